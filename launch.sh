#!/usr/bin/env bash
# Trains on one machine, a process per GPU (without GPUs: one). usage: [NPROC_PER_NODE=N] ./launch.sh [settings of train.py]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
processes=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}
python=python3; [ ! -x .venv/bin/python ] || python=.venv/bin/python
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # train.py sets its own, --threads; this only silences torchrun
LOCKSTEP_EXIT_FILE=$(mktemp -u); export LOCKSTEP_EXIT_FILE
store=$(mktemp)  # the rendezvous is a file of this user: over TCP torchrun unpickles what anyone on the network sends it
trap 'rm -f "$LOCKSTEP_EXIT_FILE" "$store"' EXIT
set -m  # a process group of its own, in which no signal is ignored: what it is to get it gets from here
"$python" -m torch.distributed.run --nnodes=1 --rdzv-backend=c10d --rdzv-conf=store_type=file --rdzv-endpoint="$store" \
  --rdzv-id="$$-$RANDOM" --local-addr=127.0.0.1 --nproc-per-node="$processes" train.py "$@" &
agent=$!
trap 'kill -TERM $agent 2>/dev/null' TERM HUP USR1; trap 'kill -INT $agent 2>/dev/null' INT
code=0; wait "$agent" || code=$?
while kill -0 "$agent" 2>/dev/null; do code=0; wait "$agent" || code=$?; done  # a signal ends a wait, not the agent
if [ "$code" != 0 ] && [ -s "$LOCKSTEP_EXIT_FILE" ]; then code=$(cat "$LOCKSTEP_EXIT_FILE"); fi  # torchrun makes every failure 1
exit "$code"
