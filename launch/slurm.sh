#!/bin/bash
# A job for Slurm. Set the three lines of your cluster, and submit it from the folder of launch.sh:
#
#   sbatch launch/slurm.sh --data DIR [settings of train.py]
#
# Two minutes before its time limit the run saves; the job goes back into the queue and continues from there. Without
# GPUs, leave --gpus-per-node out. --fresh would start over each time that the job is requeued: give a new --run-dir.

# your cluster: machines, GPUs of each, and what else it asks for, such as --partition and --account
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00

# what launch.sh needs: one task per machine, and a signal in time
#SBATCH --job-name=lockstep
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=lockstep-%j.log
srun --kill-on-bad-exit=0 --cpu-bind=none ./launch.sh "$@" &
step=$!
trap 'kill -USR1 "$step"' USR1
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM  # the step; srun itself would turn it into a SIGKILL
until wait "$step"; code=$?; ! kill -0 "$step" 2>/dev/null; do :; done
exit "$code"
