#!/usr/bin/env bash
# Trains on one machine or many: the same command on every machine, one process per GPU (without GPUs: one).
# nvidia-smi counts NVIDIA GPUs. If there are none, torch counts the GPUs of AMD and Intel.
#
#   ./launch.sh [options] [settings of train.py]                                       one machine
#   ./launch.sh --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 [settings]             on each of two, with its rank
#   ./launch.sh --nnodes 2:4 --master-addr 10.0.0.1 [settings]                         elastic: two to four machines
#   srun --ntasks-per-node=1 ./launch.sh [settings]                                    Slurm provides the rest
#
#   --nnodes N | MIN:MAX   machines                                NNODES           default 1
#   --node-rank N          index of this machine, from 0           NODE_RANK
#   --master-addr HOST     name or address of machine 0            MASTER_ADDR
#   --master-port PORT     a free port on it                       MASTER_PORT      default 29500; Slurm: by job id
#   --nproc-per-node N     processes on this machine               NPROC_PER_NODE   default one per GPU, else 1
#   --max-restarts N       times that torchrun restarts all processes               default 0; elastic 3
#   --retries N            times that this script restarts after failed hardware,   default 0
#                          lost peers or a kill
#   --dry-run              print environment and command, start nothing
#   --                     what follows belongs to train.py
#
# The third column is an environment variable with the same meaning. launch/ has jobs for Slurm and Kubernetes to copy.
# Exits with train.py's code (docs/run-directory.md), or with 143 if SIGTERM stopped the run and it saved.
# Runs .venv/bin/python if it exists (LOCKSTEP_PYTHON: another).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
script=${LOCKSTEP_SCRIPT:-$root/train.py}
python=python3
[[ ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
python=${LOCKSTEP_PYTHON:-$python}

main() {
  [[ $(uname) == Linux ]] || refuse "this system is $(uname), and train.py needs Linux: use a Linux machine or a container"
  local settings=() dry_run=''
  local nnodes='' node_rank='' master_addr='' master_port='' nproc_per_node='' max_restarts='' retries=''
  trap 'kill "${!:-}" 2>/dev/null || true; exit 143' TERM  # process 1 of a container would ignore it
  read_options "$@"
  ask_the_platform
  check_options
  compose_command
  if [[ -z $dry_run ]]; then run; fi
  printf '%q\n' "${environment[@]}"
  printf '%q ' "${command[@]}"
  echo
}

refuse() {
  echo "launch.sh: $*" >&2
  exit 64
}

read_options() {  # an option sets the variable of its name
  while (($#)); do
    local name=${1%%=*}
    name=${name//_/-}
    case $name in
      --nnodes | --node-rank | --master-addr | --master-port | --nproc-per-node | --max-restarts | --retries)
        local value=${1#*=}
        if [[ $1 != *=* ]]; then
          value=${2:-}
          shift
        fi
        [[ -n $value ]] || refuse "$name needs a value"
        name=${name#--}
        printf -v "${name//-/_}" %s "$value" ;;
      --print) refuse "--print is gone: launch/slurm.sh and launch/trainjob.yaml are jobs to copy" ;;
      --dry-run) dry_run=1 ;;
      --help | --help-all | -h)
        sed -n '2,/^set /{s/^# \{0,1\}//p}' "$root/launch.sh"
        exec "$python" "$script" "${settings[@]}" "$1" ;;
      --)
        shift
        settings+=("$@")
        break ;;
      *) settings+=("$1") ;;
    esac
    shift
  done
}

ask_the_platform() {  # for what the user did not set
  nnodes=${nnodes:-${NNODES:-}} nproc_per_node=${nproc_per_node:-${NPROC_PER_NODE:-${PET_NPROC_PER_NODE:-}}}
  [[ $nnodes != 1 ]] || return 0  # then a platform's numbers are about something else
  node_rank=${node_rank:-${NODE_RANK:-}} master_addr=${master_addr:-${MASTER_ADDR:-}}
  master_port=${master_port:-${MASTER_PORT:-}}
  if [[ -n $nnodes && -n $node_rank && -n $master_addr ]]; then :
  elif [[ -n ${PET_NNODES:-}${PET_NODE_RANK:-}${PET_MASTER_ADDR:-} ]]; then  # Kubeflow Trainer v2, elastic PyTorchJob
    local endpoint=${PET_RDZV_ENDPOINT:-}
    nnodes=${nnodes:-${PET_NNODES:-}} node_rank=${node_rank:-${PET_NODE_RANK:-}}
    master_addr=${master_addr:-${PET_MASTER_ADDR:-${endpoint%:*}}} master_port=${master_port:-${PET_MASTER_PORT:-}}
    max_restarts=${max_restarts:-${PET_MAX_RESTARTS:-}}
    [[ $endpoint != *:* ]] || master_port=${master_port:-${endpoint##*:}}
  elif [[ -n ${SLURM_JOB_ID:-} ]]; then ask_slurm
  elif [[ -n ${LOCAL_RANK:-} ]]; then
    [[ ${WORLD_SIZE:-1} == 1 ]] ||
      refuse "LOCAL_RANK=$LOCAL_RANK and WORLD_SIZE=$WORLD_SIZE: this is one of several processes;" \
        "start launch.sh once on each machine"
  elif [[ -n ${WORLD_SIZE:-}${RANK:-} ]]; then  # PyTorchJob, Alibaba PAI: numbers of machines
    nnodes=${nnodes:-${WORLD_SIZE:-}} node_rank=${node_rank:-${RANK:-}}
  fi
  node_rank=${node_rank:-${JOB_COMPLETION_INDEX:-}}  # an indexed Job of Kubernetes
}

ask_slurm() {
  local tasks=${SLURM_STEP_NUM_TASKS:-1} nodes=${SLURM_STEP_NUM_NODES:-1}
  [[ -n ${SLURM_STEP_NUM_NODES:-} || ${SLURM_JOB_NUM_NODES:-1} == 1 ]] ||
    refuse "this job has $SLURM_JOB_NUM_NODES nodes and launch.sh runs on one of them:" \
      "start it with srun --ntasks-per-node=1 ./launch.sh ..."
  [[ $tasks == "$nodes" ]] || refuse "srun started $tasks tasks on $nodes nodes; use one per node" \
    "(--ntasks-per-node=1): launch.sh starts the processes"
  nnodes=${nnodes:-$nodes} node_rank=${node_rank:-${SLURM_NODEID:-0}}
  master_port=${master_port:-$((10000 + SLURM_JOB_ID % 20000))}
  # the first of "a[3-5,9],b"; not by scontrol, which containers lack
  local hosts=${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}
  master_addr=${master_addr:-$(sed -E 's/\[([^],-]*)[^]]*\]/\1/g; s/,.*//' <<<"$hosts")}
}

check_options() {
  master_addr=${master_addr#[} master_addr=${master_addr%]}  # IPv6, as platforms write it before a port
  [[ -n $nnodes || -z $master_addr$node_rank ]] ||
    refuse "node rank '$node_rank', master address '$master_addr': an option or the environment sets one of them," \
      "but not the number of machines: --nnodes N"
  nnodes=${nnodes:-1}
  [[ $nnodes =~ ^[1-9][0-9]{0,5}(:[1-9][0-9]{0,5})?$ ]] || refuse "--nnodes $nnodes: must be a number, or MIN:MAX"
  ((${nnodes%:*} <= ${nnodes#*:})) || refuse "--nnodes $nnodes: MIN is above MAX"
  local number
  for number in node_rank master_port max_restarts retries; do
    [[ ${!number} =~ ^[0-9]{0,6}$ ]] || refuse "--${number//_/-} ${!number}: must be a number"
    [[ -z ${!number} ]] || printf -v "$number" %d "$((10#${!number}))"
  done
  [[ -z $master_port ]] || ((0 < master_port && master_port < 65536)) ||
    refuse "--master-port $master_port: must be between 1 and 65535"
  [[ -z $node_rank || $nnodes == *:* ]] || ((node_rank < nnodes)) ||
    refuse "--node-rank $node_rank: must be below --nnodes $nnodes"
  [[ $nnodes != 1 ]] || return 0
  [[ -n $master_addr ]] || refuse "--nnodes $nnodes: which machine is number 0? --master-addr HOST, the same on all"
  [[ -n $node_rank || $nnodes == *:* ]] || refuse "--nnodes $nnodes: which one is this machine? --node-rank N, from 0"
}

compose_command() {
  local facts cores has_all_cores torch processes=$nproc_per_node
  facts=$("$python" -c '
import importlib.util, os, sys
sys.path[0] = sys.argv[1]  # this program, not the current folder
from utils.distributed.preflight import require_loopback
from utils.errors import UserError
from utils.hardware.cores import available_cores
try: require_loopback()
except UserError as error: sys.exit(print("down", error))
[torch] = importlib.util.find_spec("torch").submodule_search_locations
print(available_cores(), len(os.sched_getaffinity(0)) == os.cpu_count(), torch)
' "$root" 2>/dev/null) || refuse "$python has no torch: $python -m pip install -r $root/requirements.txt"
  [[ $facts != down* ]] || refuse "${facts#down }"
  read -r cores has_all_cores torch <<<"$facts"
  [[ $processes =~ ^[1-9][0-9]{0,5}$ ]] || case $processes in
    '' | auto | gpu) processes=$(count_gpus) ;;
    cpu) processes=$cores ;;
    *) refuse "--nproc-per-node $processes: must be a number from 1 to 999999, or auto, gpu or cpu" ;;
  esac
  folder=$(mktemp --directory --dry-run)  # of this start: run() makes it
  local threads=$((cores > processes ? cores / processes : 1))
  environment=("LOCKSTEP_EXIT_FILE=$folder/exit-code" "OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}")

  # one process: without torchrun, which takes a second to start
  if [[ $nnodes == 1 ]] && ((processes == 1 && ${max_restarts:-0} == 0)); then
    command=("$python" "$script" "${settings[@]}")
    [[ -z ${RANK:-}${LOCAL_RANK:-}${WORLD_SIZE:-} ]] ||  # they are not this process's
      command=(env -u RANK -u LOCAL_RANK -u WORLD_SIZE -u LOCAL_WORLD_SIZE "${command[@]}")
    return
  fi

  # several: torchrun
  command=("$python" -P "$root/utils/distributed/torchrun.py" "--nproc-per-node=$processes" "--nnodes=$nnodes")
  # torch 2.13 or later; its default is 30 s, and a save may take longer
  if grep -q -- --shutdown-timeout "$torch/distributed/run.py"; then
    environment+=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}")
  fi
  if can_bind; then command+=(--numa-binding=node); fi
  if [[ $nnodes != 1 ]]; then
    compose_for_many "$processes"
  else  # they meet through a file of this user: over TCP torchrun unpickles what anyone on the network sends
    command+=("--max-restarts=${max_restarts:-0}" --rdzv-backend=c10d --rdzv-conf=store_type=file
      "--rdzv-endpoint=$folder/store" "--rdzv-id=$$-$RANDOM" --local-addr=127.0.0.1)
  fi
  command+=("$script" "${settings[@]}")
}

count_gpus() {  # the number of processes: 1 if there is no GPU
  local gpus
  gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU') ||
    gpus=$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l)
  if ((gpus > 0)) && [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cv -e '^-1$' -e '^$' || true)
  elif ((gpus == 0)) && ! is_on_cpu && [[ -e /dev/kfd || -n $(compgen -G '/dev/dri/renderD*') ]]; then
    # AMD and Intel: torch honours the variables that hide some, and takes 1 to 2 s to import
    gpus=$("$python" -c 'import torch; print(torch.accelerator.device_count())' 2>/dev/null) || gpus=0
  fi
  if [[ $gpus =~ ^[1-9][0-9]*$ ]]; then echo "$gpus"; else echo 1; fi
}

can_bind() {  # whether torchrun can bind each process to the NUMA node of its GPU; else it ends with a traceback
  local gpus
  gpus=$(nvidia-smi --list-gpus >/dev/null 2>&1 && count_gpus)  # other vendors: not tested, so not bound
  ((1 < gpus && processes <= gpus)) && ! is_on_cpu && [[ -d /sys/devices/system/node/node1 ]] &&
    [[ $has_all_cores == True ]] && numactl --physcpubind=+0 true 2>/dev/null &&
    "$python" -c 'import sys, torch; sys.exit(not torch.accelerator.is_available())'  # torchrun needs it
}

is_on_cpu() {
  [[ " ${settings[*]} " == *" --device"[\ =]"cpu "* ]]
}

compose_for_many() {
  local own interface master is_own to_host=0 wait_s=300
  master_port=${master_port:-29500}
  [[ ${node_rank:-0} != 0 ]] || to_host=$master_port
  [[ -z $dry_run ]] || wait_s=0
  exec 3< <(PYTHONPATH=$root "$python" -P -m utils.distributed.network "$master_addr" "$to_host" "$wait_s")
  wait $! || exit  # which a signal interrupts
  read -r own interface master is_own <&3
  exec 3<&-
  # gloo would listen at the address of the host's own name (Debian: 127.0.1.1). NCCL finds its interfaces itself.
  environment+=("GLOO_SOCKET_IFNAME=$interface")
  command+=("--local-addr=$own")
  if [[ $nnodes == *:* ]]; then
    [[ -z $node_rank ]] || is_own=$((node_rank == 0))
    # is_host: torchrun would guess from names which machine hosts the store. The workers need their own store,
    # because that of the agents outlives them.
    environment+=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
    command+=("--max-restarts=${max_restarts:-3}" --rdzv-backend=c10d "--rdzv-endpoint=$master_addr:$master_port"
      "--rdzv-conf=is_host=$is_own" "--rdzv-id=${PET_RDZV_ID:-${SLURM_JOB_ID:-lockstep}}")
  else
    [[ $node_rank == 0 || $master != @(127.*|0.0.0.0|::|::1) ]] ||
      refuse "--master-addr $master_addr is this machine itself, and --node-rank $node_rank is not 0;" \
        "use the address of machine 0 (to rehearse on one host, start torchrun twice: docs/learning.md)"
    command+=("--max-restarts=${max_restarts:-0}" "--node-rank=$node_rank" "--master-addr=$master_addr"
      "--master-port=$master_port")
  fi
  echo "launch.sh: machine ${node_rank:-?} of $nnodes, $1 processes, $own ($interface)," \
    "master $master_addr:$master_port" >&2
}

run() {
  local code agent='' signalled='' attempt pause
  mkdir -m 700 "$folder" 2>/dev/null ||
    refuse "cannot make a folder in ${TMPDIR:-/tmp}: set TMPDIR to one that is there and that you may write to"
  if [[ $nnodes != 1 && ${node_rank:-0} == 0 ]]; then
    (sleep 10 >/dev/null 2>&1; [[ -e $folder/exit-code.begun ]] || echo "launch.sh: no process has begun after 10 s:" \
      "machine 0 waits for the others of $nnodes (the same command on each, with its --node-rank), or it is slow" >&2) &
  fi
  trap 'rm -rf "$folder"; kill $(jobs -p) 2>/dev/null || true' EXIT
  LOCKSTEP_LAUNCH_ID=$(</proc/sys/kernel/random/uuid)  # the same for all retries: --fresh acts once
  export LOCKSTEP_LAUNCH_ID "${environment[@]}"
  set -m  # the command gets its own process group, and its signals from here
  trap 'pass INT INT' INT
  trap 'pass TERM TERM' TERM
  trap 'pass HUP TERM' HUP
  trap 'pass USR1 TERM' USR1  # a scheduler's warning before the time limit
  for ((attempt = 0; ; attempt++)); do
    rm -f "$folder"/*
    (trap '' USR1; exec "${command[@]}") &  # Slurm sends USR1 to all processes, and torchrun would end silently
    agent=$!
    [[ -z $signalled ]] || kill -TERM "$agent"  # it came between two starts
    # A signal, also SIGSTOP, ends the wait and not the agent. Not `wait -f`: bash 5.2 reads freed memory there, and
    # after Ctrl-C one launch in 256 never ended.
    while wait "$agent"; kill -0 "$agent" 2>/dev/null; do sleep 0.1 & wait "$!" || true; done
    code=0; wait "$agent" || code=$?
    if [[ $code != 0 && -s $folder/exit-code ]]; then code=$(<"$folder/exit-code"); fi  # torchrun makes every failure 1
    [[ -z $signalled && $attempt -lt ${retries:-0} ]] || break
    [[ $code == @(1|71|76|12[89]|1[3-9]?|2??) ]] || break  # torchrun itself, failed hardware, lost peers, a kill
    pause=$((attempt < 6 ? 2 ** attempt : 60))
    echo "launch.sh: code $code; retry $((attempt + 1)) of $retries in $pause s" >&2
    sleep "$pause" &
    agent=$!
    wait "$agent" || true
    [[ -z $signalled ]] || break
  done
  [[ $signalled != USR1 || $code != @(75|1|143) ]] || requeue  # 1, 143: torchrun had not started yet
  case $code,$signalled in
    75,TERM) code=143 ;;  # docker and Kubernetes expect it after a stop
    1,?*) code=$((128 + $(kill -l "$signalled"))) ;;  # torchrun had not started yet
  esac
  exit "$code"
}

pass() {
  signalled=$1
  [[ -z $agent ]] || kill -s "$2" "$agent" 2>/dev/null || true
}

requeue() {
  [[ -n ${SLURM_JOB_ID:-} && ${node_rank:-0} == 0 ]] || return 0
  local outcome="goes back into the queue and will continue the run"
  scontrol requeue "$SLURM_JOB_ID" || outcome="could not be requeued; submit it again to continue the run"
  echo "launch.sh: job $SLURM_JOB_ID $outcome" >&2
}

main "$@"
