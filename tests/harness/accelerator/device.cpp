// The device type "sim" as torch asks for it in C++: memory, pinned memory, devices, streams and events.
//
// A device storage lies on a host storage. sim::unwrap(tensor) is the CPU tensor there; sim::wrap(host, device) is a
// device tensor on a CPU tensor's memory, in the storage of the device tensor that it is a view of, if it is one. The
// queues are in device.py: it is asked through the dispatcher, which carries its exceptions.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <unistd.h>

using namespace c10;
using at::Tensor;
namespace at::autocast { TORCH_API Tensor cached_cast(ScalarType, const Tensor&, DeviceType); }  // a header of 20 s
namespace {
constexpr auto kSim = DeviceType::PrivateUse1;
DeviceIndex num_devices;
double budget_mib;  // of each device
thread_local DeviceIndex current = 0;  // as in CUDA, each thread has its own
thread_local StreamId streams[64] = {};  // the current one of each device; 0 is its default stream
std::mutex guarding;  // what follows
StreamId num_streams = 0;
int64_t used[64], peak[64];  // bytes, by device
std::unordered_map<StorageImpl*, weak_intrusive_ptr<StorageImpl>> device_storages;  // by host storage
std::map<const char*, size_t> pinned;  // bytes of the host, by address

struct Memory { Storage host; int64_t device, bytes, users; };  // behind a device storage; users: a bit for each stream
Memory& memory_of(const Tensor& tensor) { return *static_cast<Memory*>(tensor.storage().data_ptr().get_context()); }

void allocate(int64_t device, int64_t bytes) {
  double mib = 1 << 20, wanted = bytes / mib, free = budget_mib - used[device] / mib;
  char text[160];
  snprintf(text, sizeof text, "sim out of memory. Tried to allocate %.2f MiB. Device %d has a total capacity of "
           "%.2f MiB of which %.2f MiB is free.", wanted, static_cast<int>(device), budget_mib, free);
  TORCH_CHECK_WITH(OutOfMemoryError, wanted <= free, text);
  peak[device] = std::max(peak[device], used[device] += bytes);
}

void release(void* context) {
  std::unique_ptr<Memory> memory(static_cast<Memory*>(context));
  std::lock_guard lock(guarding);
  device_storages.erase(memory->host.unsafeGetStorageImpl());
  used[memory->device] -= memory->bytes;
}

Tensor in(Storage storage, DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// Without record_stream torch may give memory away while another stream than the one that allocated it still reads it.
Tensor unwrap(const Tensor& tensor) {
  auto& memory = memory_of(tensor);
  TORCH_CHECK(memory.users >> streams[memory.device] & 1, "sim error: memory of another stream is used on stream ",
              streams[memory.device], " without record_stream");
  return in(memory.host, DispatchKey::CPU, tensor);
}

Tensor wrap(const Tensor& tensor, int64_t device) {
  auto& host = tensor.storage();
  std::lock_guard lock(guarding);
  auto& known = device_storages.try_emplace(host.unsafeGetStorageImpl(), intrusive_ptr<StorageImpl>()).first->second;
  if (auto storage = known.lock()) return in(Storage(storage), DispatchKey::PrivateUse1, tensor);
  int64_t bytes = host.nbytes();
  allocate(device, bytes);
  auto memory = new Memory{host, device, bytes, 1 << streams[device]};
  DataPtr data(host.mutable_data(), memory, &release, Device(kSim, device));
  Storage storage(Storage::use_byte_size_t(), bytes, std::move(data));
  known = storage.getWeakStorageImpl();
  return in(storage, DispatchKey::PrivateUse1, tensor);
}

void adopt(const Tensor& tensor, const Tensor& host) {  // the shape and memory that an operation gave to unwrap(tensor)
  if (tensor.sizes() != host.sizes() || tensor.strides() != host.strides())
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  auto& memory = memory_of(tensor);
  std::lock_guard lock(guarding);
  allocate(memory.device, memory.host.nbytes() - memory.bytes);
  tensor.storage().unsafeGetStorageImpl()->set_nbytes(memory.bytes = memory.host.nbytes());
}

struct PinnedAllocator final : Allocator {
  DataPtr allocate(size_t bytes) override {
    std::lock_guard lock(guarding);
    auto address = new char[bytes + 1];  // an address of its own, even where nothing lies
    pinned[address] = bytes + 1;
    return DataPtr(address, address, [](void* freed) {
      std::lock_guard lock(guarding);
      pinned.erase(static_cast<char*>(freed));
      delete[] static_cast<char*>(freed);
    }, DeviceType::CPU);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* address) const override {
    std::lock_guard lock(guarding);
    auto after = pinned.upper_bound(static_cast<const char*>(address));
    return after != pinned.begin() && (--after, address < after->first + after->second);
  }
} hooks;

template <class Result, class... Arguments> Result ask(const char* name, Arguments... arguments) {
  return Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Result(Arguments...)>().call(arguments...);
}
int64_t recorded(int64_t device, int64_t stream) { return ask<int64_t>("sim::record", device, stream); }
void wait(int64_t event, std::string_view kind) { ask<void>("sim::wait", event, kind); }

struct Guard final : impl::NoOpDeviceGuardImpl<kSim> {  // an event is a number
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  Device getDevice() const override { return Device(kSim, current); }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.has_index() ? d.index() : current; }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < num_devices, "sim error: invalid device ordinal");
    uncheckedSetDevice(d);
  }
  Device exchangeDevice(Device d) const override { auto before = getDevice(); setDevice(d); return before; }
  Device indexed(Device d) const { return d.has_index() ? d : getDevice(); }
  Stream getStream(Device d) const noexcept override {
    return Stream(Stream::UNSAFE, indexed(d), streams[indexed(d).index()]);
  }
  Stream getNewStream(Device d, int) const override {  // CUDA also gives the same ones again
    std::lock_guard lock(guarding);
    return Stream(Stream::UNSAFE, indexed(d), 1 + num_streams++ % 8);
  }
  Stream exchangeStream(Stream s) const noexcept override {
    auto before = getStream(s.device());
    streams[s.device_index()] = s.id();
    return before;
  }
  void block(void* event, const Stream& s) const override {
    ask<void>("sim::block", reinterpret_cast<int64_t>(event), int64_t{s.device_index()}, s.id());
  }
  void record(void** event, const Stream& s, const DeviceIndex, const EventFlag) const override {
    *event = reinterpret_cast<void*>(recorded(s.device_index(), s.id()));
  }
  bool queryEvent(void* event) const override { return ask<bool>("sim::query", reinterpret_cast<int64_t>(event)); }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {  // an operation takes 1 ms
    return static_cast<double>((reinterpret_cast<int64_t>(to) >> 10) - (reinterpret_cast<int64_t>(from) >> 10));
  }
  void synchronizeEvent(void* event) const override { wait(reinterpret_cast<int64_t>(event), "event"); }
  void synchronizeStream(const Stream& s) const override { wait(recorded(s.device_index(), s.id()), "synchronize"); }
  void synchronizeDevice(const DeviceIndex d) const override { wait(recorded(d, -1), "synchronize"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
}  // namespace

TORCH_LIBRARY(sim, m) {
  m.def("wrap(Tensor host, int device) -> Tensor", TORCH_FN(wrap));
  m.def("unwrap(Tensor tensor) -> Tensor", TORCH_FN(unwrap));
  m.def("adopt(Tensor tensor, Tensor host) -> ()", TORCH_FN(adopt));
  m.def("autocast(Tensor tensor, ScalarType dtype) -> Tensor",
        [](const Tensor& tensor, ScalarType dtype) { return at::autocast::cached_cast(dtype, tensor, kSim); });
  m.def("share(Tensor tensor, int stream) -> ()",
        [](const Tensor& tensor, int64_t stream) { memory_of(tensor).users |= 1 << stream; });
  m.def("record(int device, int stream) -> int");  // these four are device.py's
  m.def("block(int event, int device, int stream) -> ()");
  m.def("wait(int event, str kind) -> ()");
  m.def("query(int event) -> bool");
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {  // module.to(device) keeps its parameters, so that tied ones stay tied
  m.impl("_has_compatible_shallow_copy_type", [](const Tensor&, const Tensor&) { return true; });
}

extern "C" void set_memory(double mib) { budget_mib = mib; }  // of each device
extern "C" void begin(int devices) {
  num_devices = devices;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
extern "C" int64_t peak_bytes(int device) { return peak[device]; }
extern "C" void hang() { for (;;) pause(); }  // in C++: while a host waits for a GPU, Python handles no signal
