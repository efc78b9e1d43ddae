#!/usr/bin/env bash
# Trains on one machine or many: the same command on every machine, a process per GPU (without GPUs: one).
# GPUs are NVIDIA's, by nvidia-smi; on a machine without these AMD's and Intel's, by torch, if it can use them.
#
#   ./launch.sh [options] [settings of train.py]                                       one machine
#   ./launch.sh --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 [settings]             on each of two, with its own rank
#   ./launch.sh --nnodes 2:4 --master-addr 10.0.0.1 [settings]                         elastic: two to four, which come and go
#   srun --ntasks-per-node=1 ./launch.sh [settings]                                    Slurm says all the rest
#   ./launch.sh --print slurm|trainjob [options] [settings] > FILE                     a job to submit
#
#   --nnodes N | MIN:MAX   machines                                NNODES           default 1
#   --node-rank N          this one's number, from 0               NODE_RANK
#   --master-addr HOST     number 0: its name or address           MASTER_ADDR
#   --master-port PORT     a free port of it                       MASTER_PORT      default 29500; under Slurm from the job's number
#   --nproc-per-node N     processes on this machine               NPROC_PER_NODE   default one per GPU, else 1
#   --max-restarts N       torchrun starts all processes again                      default 0; elastic 3
#   --retries N            this script starts all again after failed hardware,      default 0
#                          lost peers or a kill
#   --dry-run              print environment and command, start nothing
#   --                     all that follows is train.py's
#
# The third column: a variable that says the same. Platforms: docs/launching.md. Exits with train.py's code (docs/run-directory.md);
# a run that SIGTERM stopped, and that saved, with 143. Runs .venv/bin/python if there is one (LOCKSTEP_PYTHON: another).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
script=${LOCKSTEP_SCRIPT:-$root/train.py}
python=python3
[[ ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python
python=${LOCKSTEP_PYTHON:-$python}

main() {
  local settings=() dry_run='' manifest='' nnodes='' node_rank='' master_addr='' master_port='' nproc_per_node='' max_restarts='' retries=''
  trap 'kill "${!:-}" 2>/dev/null || true; exit 143' TERM  # process 1 of a container would ignore it
  read_options "$@"
  [[ -n $manifest ]] || ask_the_platform
  check_options
  case $manifest in
    '') ;;
    slurm | trainjob) print_job "$manifest"; return ;;
    *) refuse "--print $manifest: must be slurm or trainjob" ;;
  esac
  compose_command
  if [[ -z $dry_run ]]; then run; fi
  printf '%q\n' "${environment[@]}"
  printf '%q ' "${command[@]}"
  echo
}

refuse() {
  echo "launch.sh: $1" >&2
  exit 64
}

read_options() {  # an option sets the variable that says the same
  while (($#)); do
    local name=${1%%=*}
    name=${name//_/-}
    case $name in
      --nnodes | --node-rank | --master-addr | --master-port | --nproc-per-node | --max-restarts | --retries | --print)
        local value=${1#*=}
        if [[ $1 != *=* ]]; then
          value=${2:-}
          shift
        fi
        [[ -n $value ]] || refuse "$name needs a value"
        name=${name#--}
        if [[ $name == print ]]; then manifest=$value; else printf -v "${name//-/_}" %s "$value"; fi ;;
      --dry-run) dry_run=1 ;;
      --help | -h)
        sed -n '2,/^set /{s/^# \{0,1\}//p}' "$root/launch.sh"
        exec "$python" "$script" "${settings[@]}" --help ;;
      --)
        shift
        settings+=("$@")
        break ;;
      *) settings+=("$1") ;;
    esac
    shift
  done
}

ask_the_platform() {  # for what the user has not said
  nnodes=${nnodes:-${NNODES:-}} nproc_per_node=${nproc_per_node:-${NPROC_PER_NODE:-${PET_NPROC_PER_NODE:-}}}
  [[ $nnodes != 1 ]] || return 0  # a number that a platform gives it is of something else
  node_rank=${node_rank:-${NODE_RANK:-}} master_addr=${master_addr:-${MASTER_ADDR:-}} master_port=${master_port:-${MASTER_PORT:-}}
  if [[ -n $nnodes && -n $node_rank && -n $master_addr ]]; then :
  elif [[ -n ${PET_NNODES:-}${PET_NODE_RANK:-}${PET_MASTER_ADDR:-} ]]; then  # Kubeflow Trainer v2, or PyTorchJob with an elasticPolicy
    local endpoint=${PET_RDZV_ENDPOINT:-}
    nnodes=${nnodes:-${PET_NNODES:-}} node_rank=${node_rank:-${PET_NODE_RANK:-}} max_restarts=${max_restarts:-${PET_MAX_RESTARTS:-}}
    master_addr=${master_addr:-${PET_MASTER_ADDR:-${endpoint%:*}}} master_port=${master_port:-${PET_MASTER_PORT:-}}
    [[ $endpoint != *:* ]] || master_port=${master_port:-${endpoint##*:}}
  elif [[ -n ${SLURM_JOB_ID:-} ]]; then ask_slurm
  elif [[ -n ${LOCAL_RANK:-} ]]; then
    [[ ${WORLD_SIZE:-1} == 1 ]] ||
      refuse "LOCAL_RANK=$LOCAL_RANK and WORLD_SIZE=$WORLD_SIZE: this is one of several processes; start it once on each machine"
  elif [[ -n ${WORLD_SIZE:-}${RANK:-} ]]; then  # PyTorchJob, Alibaba PAI: numbers of machines
    nnodes=${nnodes:-${WORLD_SIZE:-}} node_rank=${node_rank:-${RANK:-}}
  fi
  node_rank=${node_rank:-${JOB_COMPLETION_INDEX:-}}  # an indexed Job of Kubernetes
}

ask_slurm() {
  local tasks=${SLURM_STEP_NUM_TASKS:-1} nodes=${SLURM_STEP_NUM_NODES:-1}
  [[ -n ${SLURM_STEP_NUM_NODES:-} || ${SLURM_JOB_NUM_NODES:-1} == 1 ]] ||
    refuse "this job has $SLURM_JOB_NUM_NODES nodes and launch.sh runs on one of them: start it with srun --ntasks-per-node=1 ./launch.sh ..."
  [[ $tasks == "$nodes" ]] || refuse "srun started $tasks tasks on $nodes nodes; one per node is right (--ntasks-per-node=1): launch.sh starts the processes"
  nnodes=${nnodes:-$nodes} node_rank=${node_rank:-${SLURM_NODEID:-0}}
  master_port=${master_port:-$((10000 + SLURM_JOB_ID % 20000))}
  local hosts=${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}  # "a[3-5,9],b": its first, without scontrol, which containers lack
  master_addr=${master_addr:-$(sed -E 's/\[([^],-]*)[^]]*\]/\1/g; s/,.*//' <<<"$hosts")}
}

check_options() {
  master_addr=${master_addr#[} master_addr=${master_addr%]}  # an IPv6 address as platforms write it before a port
  [[ -n $nnodes || -z $master_addr$node_rank ]] ||
    refuse "a rank or master of machines is given (NODE_RANK=$node_rank MASTER_ADDR=$master_addr), but not their number: --nnodes N"
  nnodes=${nnodes:-1}
  [[ $nnodes =~ ^[1-9][0-9]{0,5}(:[1-9][0-9]{0,5})?$ ]] || refuse "--nnodes $nnodes: must be a number, or MIN:MAX"
  ((${nnodes%:*} <= ${nnodes#*:})) || refuse "--nnodes $nnodes: MIN is above MAX"
  local number
  for number in node_rank master_port max_restarts retries; do
    [[ ${!number} =~ ^[0-9]{0,6}$ ]] || refuse "--${number//_/-} ${!number}: must be a number"
    [[ -z ${!number} ]] || printf -v "$number" %d "$((10#${!number}))"
  done
  [[ -z $master_port ]] || ((0 < master_port && master_port < 65536)) || refuse "--master-port $master_port: must be between 1 and 65535"
  [[ -z $node_rank || $nnodes == *:* ]] || ((node_rank < nnodes)) || refuse "--node-rank $node_rank: must be below --nnodes $nnodes"
  [[ $nnodes != 1 && -z $manifest ]] || return 0
  [[ -n $master_addr ]] || refuse "--nnodes $nnodes: which machine is number 0? --master-addr HOST, the same on all"
  [[ -n $node_rank || $nnodes == *:* ]] || refuse "--nnodes $nnodes: which of them is this? --node-rank N, from 0"
}

compose_command() {
  local facts cores has_all_cores torch processes=$nproc_per_node
  facts=$("$python" -c '
import importlib.util, os, sys
sys.path[0] = sys.argv[1]  # this program, not the current folder
from utils.hardware.cores import available_cores
[torch] = importlib.util.find_spec("torch").submodule_search_locations
print(available_cores(), len(os.sched_getaffinity(0)) == os.cpu_count(), torch)
' "$root" 2>/dev/null) || refuse "$python has no torch: $python -m pip install -r $root/requirements.txt"
  read -r cores has_all_cores torch <<<"$facts"
  [[ $processes =~ ^[1-9][0-9]{0,5}$ ]] || case $processes in
    '' | auto | gpu) processes=$(count_gpus) ;;
    cpu) processes=$cores ;;
    *) refuse "--nproc-per-node $processes: must be a number" ;;
  esac
  folder=$(mktemp --directory --dry-run)  # of this start: run() makes it
  environment=("LOCKSTEP_EXIT_FILE=$folder/exit-code" "OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}")
  if [[ $nnodes == 1 ]] && ((processes == 1 && ${max_restarts:-0} == 0)); then  # nothing for torchrun to do, and it takes a second to start
    command=("$python" "$script" "${settings[@]}")
    [[ -z ${RANK:-}${LOCAL_RANK:-}${WORLD_SIZE:-} ]] ||  # numbers that are not this process's
      command=(env -u RANK -u LOCAL_RANK -u WORLD_SIZE -u LOCAL_WORLD_SIZE "${command[@]}")
    return
  fi
  command=("$python" -m torch.distributed.run "--nproc-per-node=$processes" "--nnodes=$nnodes")
  if knows shutdown-timeout; then  # torch 2.13; a save may take longer than its 30 s
    environment+=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}")
  fi
  if can_bind; then command+=(--numa-binding=node); fi
  if [[ $nnodes != 1 ]]; then
    compose_for_many "$processes"
  else  # the rendezvous is a file of this user: over TCP torchrun unpickles what anyone on the network sends it
    command+=("--max-restarts=${max_restarts:-0}" --rdzv-backend=c10d --rdzv-conf=store_type=file "--rdzv-endpoint=$folder/store"
      "--rdzv-id=$$-$RANDOM" --local-addr=127.0.0.1)
  fi
  command+=("$script" "${settings[@]}")
}

count_gpus() {  # 1 where there is none: so many processes
  local gpus
  gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU') || gpus=$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l)
  if ((gpus > 0)) && [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cv -e '^-1$' -e '^$' || true)
  elif ((gpus == 0)) && ! is_on_cpu && [[ -e /dev/kfd || -n $(compgen -G '/dev/dri/renderD*') ]]; then
    # AMD's and Intel's: torch honours the variables that hide some, and takes 1 to 2 s to import
    gpus=$("$python" -c 'import torch; print(torch.accelerator.device_count())' 2>/dev/null) || gpus=0
  fi
  if [[ $gpus =~ ^[1-9][0-9]*$ ]]; then echo "$gpus"; else echo 1; fi
}

can_bind() {  # each process to the NUMA node of its GPU; else torchrun would end with a traceback
  local gpus
  gpus=$(nvidia-smi --list-gpus >/dev/null 2>&1 && count_gpus)  # other makers' are not bound: untried
  ((1 < gpus && processes <= gpus)) && ! is_on_cpu && [[ -d /sys/devices/system/node/node1 ]] &&
    [[ $has_all_cores == True ]] && knows numa-binding && numactl --physcpubind=+0 true 2>/dev/null &&  # installed, and works
    "$python" -c 'import sys, torch; sys.exit(not torch.accelerator.is_available())'  # torchrun asks it for the GPU's node
}

is_on_cpu() {
  [[ " ${settings[*]} " == *" --device"[\ =]"cpu "* ]]
}

knows() {  # whether this torchrun has an option
  grep -q -- "\"--$1\"" "$torch/distributed/run.py"
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
  # gloo would listen where the host's own name leads (Debian: 127.0.1.1). NCCL finds its interfaces itself.
  environment+=("GLOO_SOCKET_IFNAME=$interface")
  command+=("--local-addr=$own")
  if [[ $nnodes == *:* ]]; then
    [[ -z $node_rank ]] || is_own=$((node_rank == 0))
    # Which machine hosts the store is said, not guessed from names; workers get a store of their own, for the agents' outlives them.
    environment+=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
    command+=("--max-restarts=${max_restarts:-3}" --rdzv-backend=c10d "--rdzv-endpoint=$master_addr:$master_port"
      "--rdzv-conf=is_host=$is_own" "--rdzv-id=${PET_RDZV_ID:-${SLURM_JOB_ID:-lockstep}}")
  else
    [[ $node_rank == 0 || $master != @(127.*|0.0.0.0|::|::1) ]] ||
      refuse "--master-addr $master_addr is this machine alone, and --node-rank $node_rank is not 0; give number 0's address"
    command+=("--max-restarts=${max_restarts:-0}" "--node-rank=$node_rank" "--master-addr=$master_addr" "--master-port=$master_port")
  fi
  echo "launch.sh: machine ${node_rank:-?} of $nnodes, $1 processes, $own ($interface), master $master_addr:$master_port" >&2
}

print_job() {
  local gpus=$nproc_per_node options=(${master_port:+--master-port "$master_port"} ${max_restarts:+--max-restarts "$max_restarts"}
    ${retries:+--retries "$retries"})
  [[ -z $master_addr$node_rank ]] || refuse "--print $1: --master-addr and --node-rank are the scheduler's to say"
  [[ $nnodes != *:* ]] || refuse "--print $1 --nnodes $nnodes: such a job has one number of nodes"
  [[ " ${settings[*]} " != *" --fresh "* ]] ||
    refuse "--print $1: --fresh could start over each time the platform starts the job again; give a new --run-dir"
  ! is_on_cpu || gpus=0
  [[ $gpus =~ ^[0-9]+$ && (-z $nproc_per_node || $nproc_per_node =~ ^[1-9][0-9]*$) ]] ||
    refuse "--print $1: how many GPUs has a machine? --nproc-per-node N, or --device cpu"
  "print_$1"
}

print_slurm() {
  local resources=''
  ((gpus == 0)) || resources="
#SBATCH --gpus-per-node=$gpus"
  options+=(${nproc_per_node:+--nproc-per-node "$nproc_per_node"} -- "${settings[@]}")
  cat <<END
#!/bin/bash
#SBATCH --job-name=lockstep
#SBATCH --nodes=$nnodes
#SBATCH --ntasks-per-node=1$resources
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=lockstep-%j.log
# Two minutes before its time is over the run saves, goes back into the queue, and continues from there.
cd $(printf %q "$PWD") || exit
srun --kill-on-bad-exit=0 --cpu-bind=none $(printf '%q ' "$root/launch.sh" "${options[@]}")&
step=\$!
trap 'kill -USR1 "\$step"' USR1
trap 'scancel --signal=TERM "\$SLURM_JOB_ID"' TERM  # the step; srun itself would make a SIGKILL of it
until wait "\$step"; code=\$?; ! kill -0 "\$step" 2>/dev/null; do :; done
exit "\$code"
END
}

print_trainjob() {
  local arguments
  arguments=$("$python" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "${options[@]}" -- "${settings[@]}")
  cat <<END
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {generateName: lockstep-}
spec:
  runtimeRef: {name: torch-distributed}
  trainer:
    image: ${IMAGE:-lockstep}
    command: [./launch.sh]
    args: $arguments
    env: [{name: LOCKSTEP_CACHE, value: /app/runs/.cache}]
    numNodes: $nnodes
    numProcPerNode: ${nproc_per_node:-1}
    resourcesPerNode: {limits: {nvidia.com/gpu: $gpus}}
  runtimePatches:
    - manager: lockstep/launch
      trainingRuntimeSpec: {template: {spec: {replicatedJobs: [{name: node, template: {spec: {template: {spec: {
        terminationGracePeriodSeconds: 120,
        securityContext: {fsGroup: 1000},
        volumes: [
          {name: runs, persistentVolumeClaim: {claimName: ${RUNS_CLAIM:-lockstep-runs}}},
          {name: data, persistentVolumeClaim: {claimName: ${DATA_CLAIM:-lockstep-data}, readOnly: true}},
          {name: shared-memory, emptyDir: {medium: Memory}}],
        containers: [{name: node, volumeMounts: [
          {name: runs, mountPath: /app/runs}, {name: data, mountPath: /data}, {name: shared-memory, mountPath: /dev/shm}]}]
        }}}}}]}}}
END
}

run() {
  local code agent='' signalled='' attempt pause
  mkdir -m 700 "$folder"
  trap 'rm -rf "$folder"' EXIT
  LOCKSTEP_LAUNCH_ID=$(</proc/sys/kernel/random/uuid)  # one over all retries: --fresh acts once
  export LOCKSTEP_LAUNCH_ID "${environment[@]}"
  set -m  # its own process group, and no signal ignored: what it is to get it gets from here
  trap 'pass INT INT' INT
  trap 'pass TERM TERM' TERM
  trap 'pass HUP TERM' HUP
  trap 'pass USR1 TERM' USR1  # of a scheduler: the end is near
  for ((attempt = 0; ; attempt++)); do
    rm -f "$folder"/*
    (trap '' USR1; exec "${command[@]}") &  # Slurm sends it to all of them, and torchrun would end without a word
    agent=$!
    [[ -z $signalled ]] || kill -TERM "$agent"  # it came in between
    # A signal ends the wait, not the agent, and so does SIGSTOP. Not `wait -f`: bash 5.2 reads freed memory there, and after
    # Ctrl-C one launch in 256 never ended.
    while wait "$agent"; kill -0 "$agent" 2>/dev/null; do sleep 0.1 & wait "$!" || true; done
    code=0; wait "$agent" || code=$?
    if [[ $code != 0 && -s $folder/exit-code ]]; then code=$(<"$folder/exit-code"); fi  # torchrun makes every failure 1
    [[ -z $signalled && $attempt -lt ${retries:-0} ]] || break
    [[ $code == @(1|71|76|12[89]|1[3-9]?|2??) ]] || break  # torchrun itself, failed hardware, a lost peer, a kill
    pause=$((attempt < 6 ? 2 ** attempt : 60))
    echo "launch.sh: code $code; retry $((attempt + 1)) of $retries in $pause s" >&2
    sleep "$pause" &
    agent=$!
    wait "$agent" || true
    [[ -z $signalled ]] || break
  done
  [[ $signalled != USR1 || $code != @(75|1|143) ]] || requeue  # 1, 143: torchrun was not under way yet
  case $code,$signalled in
    75,TERM) code=143 ;;  # what docker and Kubernetes take for a stop
    1,?*) code=$((128 + $(kill -l "$signalled"))) ;;  # torchrun was not under way yet
  esac
  exit "$code"
}

pass() {
  signalled=$1
  [[ -z $agent ]] || kill -s "$2" "$agent" 2>/dev/null || true
}

requeue() {
  [[ -n ${SLURM_JOB_ID:-} && ${node_rank:-0} == 0 ]] || return 0
  if scontrol requeue "$SLURM_JOB_ID"; then
    echo "launch.sh: job $SLURM_JOB_ID goes back into the queue, and continues from there" >&2
  else
    echo "launch.sh: job $SLURM_JOB_ID could not be requeued; submitted again it continues" >&2
  fi
}

main "$@"
