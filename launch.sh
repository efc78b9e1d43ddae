#!/usr/bin/env bash
# Trains on one machine or many: the same command on every machine, a process per GPU (without GPUs: one).
#
#   ./launch.sh [options] [settings of train.py]                                       one machine
#   ./launch.sh --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 [settings]             on each of two, with its own rank
#   ./launch.sh --nnodes 2:4 --master-addr 10.0.0.1 [settings]                         elastic: two to four, which come and go
#   srun --ntasks-per-node=1 ./launch.sh [settings]                                    Slurm says all the rest
#   ./launch.sh --print slurm|trainjob [options] [settings] > FILE                     a job to submit (IMAGE, CLAIM: of a TrainJob)
#
#   --nnodes N | MIN:MAX   machines                                NNODES           default 1
#   --node-rank N          this one's number, from 0               NODE_RANK
#   --master-addr HOST     number 0: its name or address           MASTER_ADDR
#   --master-port PORT     a free port of it                       MASTER_PORT      default 29500; under Slurm from the job's number
#   --nproc-per-node N     processes on this machine               NPROC_PER_NODE   default one per GPU, else 1
#   --max-restarts N       torchrun starts all processes again     MAX_RESTARTS     default 0; elastic 3
#   --retries N            this script starts torchrun again       RETRIES          default 0
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
  local settings=() dry_run='' manifest=''
  read_options "$@"
  ask_the_platform
  check_options
  if [[ -n $manifest ]]; then "print_$manifest"; return; fi
  compose_command
  if [[ -n $dry_run ]]; then
    printf '%s\n' "${environment[@]}"
    printf '%q ' "${command[@]}"; echo
    return
  fi
  run
}

refuse() {
  echo "launch.sh: $1" >&2
  exit "${2:-64}"
}

read_options() {  # an option sets the variable that says the same
  while (($#)); do
    local name=${1%%=*}
    name=${name//_/-}
    case $name in
      --nnodes | --node-rank | --master-addr | --master-port | --nproc-per-node | --max-restarts | --retries | --print)
        local value=${1#*=}
        if [[ $1 != *=* ]]; then
          (($# > 1)) || refuse "$1 needs a value"
          value=$2
          shift
        fi
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
  nnodes=${nnodes:-${NNODES:-}} node_rank=${node_rank:-${NODE_RANK:-}}
  master_addr=${master_addr:-${MASTER_ADDR:-}} master_port=${master_port:-${MASTER_PORT:-}}
  nproc_per_node=${nproc_per_node:-${NPROC_PER_NODE:-}} max_restarts=${max_restarts:-${MAX_RESTARTS:-}} retries=${retries:-${RETRIES:-0}}
  if [[ $nnodes == 1 || (-n $nnodes && -n $master_addr) ]]; then :
  elif [[ -n ${PET_NNODES:-} ]]; then  # Kubeflow Trainer v2, or PyTorchJob with an elasticPolicy
    nnodes=${nnodes:-$PET_NNODES} node_rank=${node_rank:-${PET_NODE_RANK:-}}
    master_addr=${master_addr:-${PET_MASTER_ADDR:-${PET_RDZV_ENDPOINT%:*}}}
    master_port=${master_port:-${PET_MASTER_PORT:-${PET_RDZV_ENDPOINT##*:}}}
    nproc_per_node=${nproc_per_node:-${PET_NPROC_PER_NODE:-}} max_restarts=${max_restarts:-${PET_MAX_RESTARTS:-}}
  elif [[ -n ${SLURM_JOB_ID:-} ]]; then ask_slurm
  elif [[ -n ${WORLD_SIZE:-} && -n ${RANK:-} && -z ${LOCAL_RANK:-} ]]; then  # PyTorchJob, Alibaba PAI: numbers of machines
    nnodes=${nnodes:-$WORLD_SIZE} node_rank=${node_rank:-$RANK}
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
  master_addr=${master_addr:-$(first_host "${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}")}
}

first_host() {  # of "a[3-5,9],b"; scontrol is missing in containers
  scontrol show hostnames "$1" 2>/dev/null | head -n 1 | grep . && return
  local head=${1%%[,\[]*}
  if [[ $1 == "${head}["* ]]; then
    local number=${1#*\[}
    head+=${number%%[-,\]]*}${1#*\]}
    head=${head%%,*}
  fi
  echo "$head"
}

check_options() {
  [[ -n $nnodes || -z $master_addr$node_rank ]] ||
    refuse "a rank or master of machines is given (NODE_RANK=$node_rank MASTER_ADDR=$master_addr), but not their number: --nnodes N"
  nnodes=${nnodes:-1}
  [[ $nnodes =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || refuse "--nnodes $nnodes: must be a number, or MIN:MAX"
  is_elastic=''
  if [[ $nnodes == *:* ]]; then
    ((${nnodes%:*} <= ${nnodes#*:})) || refuse "--nnodes $nnodes: MIN is above MAX"
    is_elastic=1
  fi
  local number
  for number in node_rank master_port max_restarts retries; do
    [[ ${!number} =~ ^[0-9]*$ ]] || refuse "--${number//_/-} ${!number}: must be a number"
  done
  [[ -z $manifest || $manifest == slurm || $manifest == trainjob ]] || refuse "--print $manifest: must be slurm or trainjob"
  [[ $nnodes != 1 && -z $manifest ]] || return 0
  [[ -n $master_addr ]] || refuse "--nnodes $nnodes: which machine is number 0? --master-addr HOST, the same on all"
  [[ -n $is_elastic || -n $node_rank ]] || refuse "--nnodes $nnodes: which of them is this? --node-rank N, from 0"
  [[ -n $is_elastic ]] || ((node_rank < nnodes)) || refuse "--node-rank $node_rank: must be below --nnodes $nnodes"
}

compose_command() {
  local torch gpus processes
  folder=$(mktemp --directory --dry-run)
  torch=$("$python" -c 'import importlib.util as u; print(*u.find_spec("torch").submodule_search_locations)' 2>/dev/null) ||
    refuse "$python has no torch: $python -m pip install -r $root/requirements.txt"
  gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
  ((gpus == 0)) || [[ -z ${CUDA_VISIBLE_DEVICES+set} ]] || gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cv -e '^-1$' -e '^$' || true)
  processes=$nproc_per_node
  [[ $processes =~ ^[1-9][0-9]*$ ]] || case $processes in
    '' | auto | gpu) processes=$((gpus > 0 ? gpus : 1)) ;;
    cpu) processes=$(nproc) ;;
    *) refuse "--nproc-per-node $processes: must be a number" ;;
  esac
  environment=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > processes ? $(nproc) / processes : 1))}")
  if [[ $nnodes == 1 ]] && ((processes == 1 && ${max_restarts:-0} == 0)); then  # nothing for torchrun to do, and it takes a second to start
    command=("$python" "$script" "${settings[@]}")
    [[ -z ${RANK:-}${WORLD_SIZE:-} ]] || command=(env -u RANK -u WORLD_SIZE "${command[@]}")  # a platform's numbers of machines
    return
  fi
  command=("$python" -m torch.distributed.run "--nproc-per-node=$processes" "--max-restarts=${max_restarts:-$((${#is_elastic} * 3))}")
  if knows shutdown-timeout; then  # torch 2.13; a save may take longer than its 30 s
    environment+=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}")
  fi
  if ((gpus > 0)) && [[ -d /sys/devices/system/node/node1 ]] && knows numa-binding; then command+=(--numa-binding=node); fi
  if [[ $nnodes != 1 ]]; then
    compose_for_many "$processes"
  else  # the rendezvous is a file of this user: over TCP torchrun unpickles what anyone on the network sends it
    command+=(--nnodes=1 --rdzv-backend=c10d --rdzv-conf=store_type=file "--rdzv-endpoint=$folder/store" "--rdzv-id=$$-$RANDOM"
      --local-addr=127.0.0.1)
  fi
  command+=("$script" "${settings[@]}")
}

knows() {  # whether this torchrun has an option
  grep -q -- "\"--$1\"" "$torch/distributed/run.py"
}

compose_for_many() {
  local found own interface master is_own to_host=0 wait_s=300
  master_port=${master_port:-29500}
  [[ ${node_rank:-0} != 0 ]] || to_host=$master_port
  [[ -z $dry_run ]] || wait_s=0
  found=$(PYTHONPATH=$root "$python" -m utils.network "$master_addr" "$to_host" "$wait_s") || exit
  read -r own interface master is_own <<<"$found"
  # gloo would listen where the host's own name leads (Debian: 127.0.1.1). NCCL finds its interfaces itself.
  environment+=("GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}")
  command+=("--nnodes=$nnodes" "--local-addr=$own")
  if [[ -n $is_elastic ]]; then
    [[ -z $node_rank ]] || is_own=$((node_rank == 0))
    # Which machine hosts the store is said, not guessed from names; workers get a store of their own, for the agents' outlives them.
    environment+=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
    command+=(--rdzv-backend=c10d "--rdzv-endpoint=$master_addr:$master_port" "--rdzv-conf=is_host=$is_own" 
      "--rdzv-id=${PET_RDZV_ID:-${SLURM_JOB_ID:-lockstep}}")
  else
    [[ $node_rank == 0 || $master != @(127.*|::1) ]] ||
      refuse "--master-addr $master_addr is this machine alone, and --node-rank $node_rank is not 0; give an address of number 0's network ($own?)"
    command+=("--node-rank=$node_rank" "--master-addr=$master_addr" "--master-port=$master_port")
  fi
  local most=$((${nnodes#*:} * $1))
  ((most <= 16)) || environment+=(TORCH_GLOO_LAZY_INIT=1)  # connections when they are needed: of 128 ranks 0.02 s instead of 11 s
  echo "launch.sh: machine ${node_rank:-?} of $nnodes, $1 processes, $own ($interface), master $master_addr:$master_port" >&2
}

print_slurm() {
  local gpus=''
  [[ -z $is_elastic ]] || refuse "--print slurm --nnodes $nnodes: a job of Slurm has one number of nodes"
  [[ -z $nproc_per_node || " ${settings[*]} " == *" --device"[\ =]"cpu "* ]] || gpus="
#SBATCH --gpus-per-node=$nproc_per_node"
  cat <<END
#!/bin/bash
#SBATCH --job-name=lockstep
#SBATCH --nodes=$nnodes
#SBATCH --ntasks-per-node=1$gpus
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=lockstep-%j.log
# Two minutes before its time is over, or when it must give way, the run saves, goes back into the queue, and continues from there.
cd $(printf %q "$PWD") || exit
srun --kill-on-bad-exit=0 $(printf '%q ' "$root/launch.sh" ${nproc_per_node:+--nproc-per-node "$nproc_per_node"} -- "${settings[@]}")&
step=\$!
trap 'kill -USR1 "\$step"' USR1
trap 'kill -TERM "\$step"' TERM
until wait "\$step"; code=\$?; ! kill -0 "\$step" 2>/dev/null; do :; done
exit "\$code"
END
}

print_trainjob() {
  [[ -z $is_elastic ]] || refuse "--print trainjob --nnodes $nnodes: a TrainJob has one number of nodes"
  cat <<END
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  generateName: lockstep-
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    image: ${IMAGE:-lockstep}
    command: [./launch.sh]
    args: $("$python" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "${settings[@]}")
    numNodes: $nnodes
    numProcPerNode: ${nproc_per_node:-1}
    resourcesPerNode:
      limits:
        nvidia.com/gpu: ${nproc_per_node:-1}
  runtimePatches:
    - manager: lockstep/launch
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    template:
                      spec:
                        terminationGracePeriodSeconds: 120
                        volumes:
                          - {name: runs, persistentVolumeClaim: {claimName: ${CLAIM:-lockstep-runs}}}
                          - {name: shared-memory, emptyDir: {medium: Memory}}
                        containers:
                          - name: node
                            volumeMounts: [{name: runs, mountPath: /app/runs}, {name: shared-memory, mountPath: /dev/shm}]
END
}

run() {
  local code agent signalled='' attempt
  mkdir -m 700 "$folder"
  trap 'rm -rf "$folder"' EXIT
  export "LOCKSTEP_EXIT_FILE=$folder/exit-code" "${environment[@]}"
  set -m  # its own process group, and no signal ignored: what it is to get it gets from here
  trap 'pass INT INT' INT
  trap 'pass TERM TERM' TERM
  trap 'pass HUP TERM' HUP
  trap 'pass USR1 TERM' USR1  # of a scheduler: the end is near
  for ((attempt = 0; ; attempt++)); do
    once
    [[ -z $signalled && $attempt -lt $retries ]] || break
    case $code in  # a lost peer, a kill, torchrun itself
      1 | 76 | 12[89] | 1[3-9]? | 2??) ;;
      *) break ;;
    esac
    local pause=$((attempt < 5 ? 2 ** attempt : 60))
    echo "launch.sh: code $code; retry $((attempt + 1)) of $retries in $pause s" >&2
    sleep "$pause" &
    agent=$!
    wait "$agent" || true
    [[ -z $signalled ]] || break
  done
  if [[ $code == 75 && $signalled == USR1 && -n ${SLURM_JOB_ID:-} ]]; then requeue; fi
  case $code,$signalled in
    75,TERM) code=143 ;;  # what docker and Kubernetes take for a stop
    1,?*) code=$((128 + $(kill -l "$signalled"))) ;;  # torchrun was not under way yet
  esac
  exit "$code"
}

once() {
  rm -f "$folder"/*
  (trap '' USR1; exec "${command[@]}") &  # Slurm sends it to all of them, and torchrun would end without a word
  agent=$!
  code=0
  wait "$agent" || code=$?
  while kill -0 "$agent" 2>/dev/null; do  # a signal ends a wait, not the agent
    code=0
    wait "$agent" || code=$?
  done
  if [[ $code != 0 && -s $LOCKSTEP_EXIT_FILE ]]; then code=$(<"$LOCKSTEP_EXIT_FILE"); fi  # torchrun makes every failure 1
}

pass() {
  signalled=$1
  kill -s "$2" "$agent" 2>/dev/null || true
}

requeue() {
  [[ $node_rank == 0 && $(scontrol show job "$SLURM_JOB_ID" 2>/dev/null) == *Requeue=1* ]] || return 0
  echo "launch.sh: job $SLURM_JOB_ID goes back into the queue, and continues from there" >&2
  scontrol requeue "$SLURM_JOB_ID"
}

main "$@"
