// The device type "sim" as torch asks for it in C++: devices, memory, pinned memory, events and streams.
//
// A device tensor lies in host memory of its own: sim::unwrap(t) is a CPU tensor on the same memory, sim::wrap(t, device)
// a device tensor on that of a CPU tensor, with the storage of the tensor that it is a view of. device.py decides all
// the rest. It is asked through the dispatcher (sim::issued, sim::wait, sim::query), which carries its exceptions.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <unistd.h>

using namespace c10;

namespace {
constexpr auto kSim = DeviceType::PrivateUse1;
constexpr int kMost = 64;
constexpr double MiB = 1 << 20;
DeviceIndex num_devices = 4;
int64_t budget = INT64_MAX;  // bytes of each device
thread_local DeviceIndex current = 0;  // as in CUDA, each thread has its own
std::atomic<int64_t> used[kMost], peak[kMost];

std::mutex guarding;  // what follows
std::unordered_map<StorageImpl*, weak_intrusive_ptr<StorageImpl>> device_storages;  // by the host storage below
std::map<const char*, size_t> pinned;  // by address

// memory of the devices

struct Memory {  // the context of a device storage
  Storage host;
  DeviceIndex device;
  int64_t bytes;
};

void count(DeviceIndex device, int64_t bytes) {
  int64_t now = used[device] += bytes, highest = peak[device];
  if (bytes > 0 && now > budget) {
    used[device] -= bytes;
    char text[200];
    snprintf(text, sizeof text, "sim out of memory. Tried to allocate %.2f MiB. Device %d has a total capacity of %.2f MiB of "
             "which %.2f MiB is free.", bytes / MiB, device, budget / MiB, (budget - now + bytes) / MiB);
    TORCH_CHECK_WITH(OutOfMemoryError, false, text);
  }
  while (highest < now && !peak[device].compare_exchange_weak(highest, now)) {}
}

void release(void* context) {
  std::unique_ptr<Memory> memory(static_cast<Memory*>(context));
  std::lock_guard held(guarding);
  device_storages.erase(memory->host.unsafeGetStorageImpl());
  count(memory->device, -memory->bytes);
}

DataPtr on_device(Storage host, DeviceIndex device) {
  auto bytes = static_cast<int64_t>(host.nbytes());
  count(device, bytes);
  auto address = host.mutable_data();
  return DataPtr(address, new Memory{std::move(host), device, bytes}, &release, Device(kSim, device));
}

struct DeviceAllocator final : Allocator {  // for storages that torch makes without an operation
  DataPtr allocate(size_t bytes) override {
    return on_device(Storage(Storage::use_byte_size_t(), bytes, GetCPUAllocator(), true), current);
  }
  DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} device_allocator;

Memory* memory_of(const at::Tensor& tensor) {
  auto& data = tensor.storage().data_ptr();
  TORCH_CHECK(data.get_deleter() == &release, "a tensor of the device sim that its memory is not of");
  return static_cast<Memory*>(data.get_context());
}

at::Tensor in_storage(Storage storage, DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

at::Tensor unwrap(const at::Tensor& tensor) {
  auto memory = memory_of(tensor);
  std::lock_guard held(guarding);
  device_storages.try_emplace(memory->host.unsafeGetStorageImpl(), tensor.storage().getWeakStorageImpl());
  return in_storage(memory->host, DispatchKey::CPU, tensor);
}

at::Tensor wrap(const at::Tensor& host, int64_t device) {
  std::unique_lock held(guarding);
  auto found = device_storages.find(host.storage().unsafeGetStorageImpl());
  if (found != device_storages.end())
    return in_storage(Storage(found->second.lock()), DispatchKey::PrivateUse1, host);
  held.unlock();
  Storage storage(Storage::use_byte_size_t(), host.storage().nbytes(), on_device(host.storage(), device), &device_allocator, true);
  return in_storage(std::move(storage), DispatchKey::PrivateUse1, host);
}

void adopt(at::Tensor tensor, const at::Tensor& host) {  // what an operation in place made of sizes and memory
  if (tensor.sizes() != host.sizes() || tensor.strides() != host.strides() || tensor.storage_offset() != host.storage_offset())
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  auto memory = memory_of(tensor);
  auto bytes = static_cast<int64_t>(memory->host.nbytes());
  if (bytes == memory->bytes) return;
  count(memory->device, bytes - memory->bytes);
  memory->bytes = bytes;
  tensor.storage().unsafeGetStorageImpl()->set_nbytes(bytes);
}

at::Tensor& set(at::Tensor& tensor, Storage source, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  auto impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return tensor;
}

at::Tensor& set_whole(at::Tensor& tensor, Storage source) {
  SymInt size(static_cast<int64_t>(source.nbytes() / tensor.itemsize()));
  return set(tensor, std::move(source), 0, {size}, {1});
}

// pinned memory of the host

void unpin(void* address) {
  std::lock_guard held(guarding);
  pinned.erase(static_cast<char*>(address));
  free_cpu(address);
}

struct PinnedAllocator final : Allocator {
  DataPtr allocate(size_t bytes) override {
    auto address = static_cast<char*>(alloc_cpu(std::max<size_t>(bytes, 1)));
    std::lock_guard held(guarding);
    pinned[address] = std::max<size_t>(bytes, 1);
    return DataPtr(address, address, &unpin, DeviceType::CPU);
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* address) const override {
    std::lock_guard held(guarding);
    auto after = pinned.upper_bound(static_cast<const char*>(address));
    return after != pinned.begin() && (--after, address < after->first + after->second);
  }
} hooks;

// devices, events, streams

template <class R, class... A>
R ask(const char* name, A... arguments) {
  return Dispatcher::singleton().findSchemaOrThrow(name, "").typed<R(A...)>().call(arguments...);
}

struct Recorded { DeviceIndex device; int64_t place; };

struct Guard final : impl::NoOpDeviceGuardImpl<kSim> {
  static Recorded* at(void* event) { return static_cast<Recorded*>(event); }
  Device exchangeDevice(Device d) const override { Device before(kSim, current); setDevice(d); return before; }
  Device getDevice() const override { return Device(kSim, current); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < num_devices, "sim error: invalid device ordinal ", int(d.index()));
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  Stream getStream(Device d) const noexcept override { return Stream(Stream::DEFAULT, d.index() < 0 ? getDevice() : d); }
  Stream getDefaultStream(Device d) const override { return getStream(d); }
  Stream getNewStream(Device d, int) const override { return getStream(d); }
  Stream exchangeStream(Stream s) const noexcept override { return getStream(s.device()); }
  void record(void** event, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    if (!*event) *event = new Recorded;
    *at(*event) = {stream.device_index(), ask<int64_t>("sim::issued", int64_t(stream.device_index()))};
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete at(event); }
  void block(void*, const Stream&) const override {}  // a device has one stream
  bool queryEvent(void* event) const override { return !event || ask<bool>("sim::query", int64_t(at(event)->device), at(event)->place); }
  bool queryStream(const Stream& s) const override {
    return ask<bool>("sim::query", int64_t(s.device_index()), ask<int64_t>("sim::issued", int64_t(s.device_index())));
  }
  void synchronizeEvent(void* event) const override {
    if (event) ask<void>("sim::wait", int64_t(at(event)->device), at(event)->place, std::string_view("event"));
  }
  void synchronizeStream(const Stream& s) const override { synchronizeDevice(s.device_index()); }
  void synchronizeDevice(const DeviceIndex d) const override {
    ask<void>("sim::wait", int64_t(d), ask<int64_t>("sim::issued", int64_t(d)), std::string_view("synchronize"));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
}  // namespace

namespace at::autocast { TORCH_API Tensor cached_cast(ScalarType, const Tensor&, DeviceType); }  // autocast_mode.h takes long

TORCH_LIBRARY(sim, m) {
  m.def("unwrap(Tensor tensor) -> Tensor", TORCH_FN(unwrap));
  m.def("wrap(Tensor host, int device) -> Tensor", TORCH_FN(wrap));
  m.def("adopt(Tensor tensor, Tensor host) -> ()", TORCH_FN(adopt));
  m.def("cast(ScalarType dtype, Tensor tensor) -> Tensor", [](ScalarType dtype, const at::Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, kSim);
  });
  m.def("issued(int device) -> int");
  m.def("wait(int device, int place, str kind) -> ()");
  m.def("query(int device, int place) -> bool");
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set));
  m.impl("set_.source_Storage", TORCH_FN(set_whole));
  m.impl("_has_compatible_shallow_copy_type", [](const at::Tensor&, const at::Tensor&) { return true; });  // .data = ...
}

extern "C" {
void sim_begin(int devices, int64_t memory) {
  num_devices = devices;
  budget = memory;
  SetAllocator(kSim, &device_allocator);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
int64_t sim_peak(int device) { return peak[device]; }
void sim_hang() { for (;;) pause(); }  // in C++: no handler of a signal runs in Python while a host waits for a GPU
}
