# shellcheck shell=bash disable=SC2154
# launch.sh --print slurm|trainjob: fills a template of this folder. launch.sh sources this file and sets the variables.

print_job() {
  local gpus=$nproc_per_node options
  options=(${master_port:+--master-port "$master_port"} ${max_restarts:+--max-restarts "$max_restarts"}
    ${retries:+--retries "$retries"})
  [[ -z $master_addr$node_rank ]] ||
    refuse "--print $1: --master-addr and --node-rank are set by the scheduler; leave them out"
  [[ $nnodes != *:* ]] || refuse "--print $1 --nnodes $nnodes: such a job has a fixed number of nodes; give one number"
  [[ " ${settings[*]} " != *" --fresh "* ]] ||
    refuse "--print $1: --fresh could start over each time the platform restarts the job; use a new --run-dir"
  ! is_on_cpu || gpus=0
  [[ $gpus =~ ^[0-9]+$ && (-z $nproc_per_node || $nproc_per_node =~ ^[1-9][0-9]*$) ]] ||
    refuse "--print $1: how many GPUs does a machine have? --nproc-per-node N, or --device cpu"
  "print_$1"
}

print_slurm() {
  options+=(${nproc_per_node:+--nproc-per-node "$nproc_per_node"})
  fill slurm.sh NODES "$nnodes" GPUS "$gpus" FOLDER "$(printf %q "$PWD")" \
    COMMAND "$(printf '%q ' "$root/launch.sh" "${options[@]}" -- "${settings[@]}")" |
    sed '/^#SBATCH --gpus-per-node=0$/d'
}

print_trainjob() {
  local arguments
  arguments=$("$python" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "${options[@]}" -- "${settings[@]}")
  fill trainjob.yaml NODES "$nnodes" GPUS "$gpus" PROCESSES "${nproc_per_node:-1}" IMAGE "${IMAGE:-lockstep}" \
    RUNS_CLAIM "${RUNS_CLAIM:-lockstep-runs}" DATA_CLAIM "${DATA_CLAIM:-lockstep-data}" ARGUMENTS "$arguments"
}

fill() {  # launch/$1.template with the values NAME VALUE ...; the user's words last, because they may contain an @NAME@
  local text
  text=$(<"$root/launch/$1.template")
  shift
  while (($#)); do
    text=${text//"@$1@"/"$2"}
    shift 2
  done
  echo "$text"
}
