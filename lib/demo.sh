#!/bin/sh
# The demo of install.sh: one loop from its first tick to its last, in a throw-away project, with the
# scripted agent of templates/loops/demo. Each tick's JSON and the final state are compared with the
# story below; a demo that goes another way fails.
#
#   demo.sh [DIR]
#
# AUTOMATON_DEMO_PROGRAMS names a folder with the programs to use, e.g. bin/; else their sources run.
set -eu

TASK=greet-nobody

die() {
  printf '%s\n' "$1" >&2
  exit 1
}

# surprise WHAT: the end of a demo that did not go as the story tells.
surprise() { die "Cannot finish the demo as scripted: $1"; }

# say TEXT: a remark between the commands.
say() { printf '\n# %s\n' "$1"; }

# show ARG…: prints a command the way a person would type it.
show() {
  printf '\n$'
  for word; do
    case $word in
      *[!A-Za-z0-9_./=-]*) printf " '%s'" "$word" ;;
      *) printf ' %s' "$word" ;;
    esac
  done
  printf '\n'
}

# program NAME ARG…: runs one of the programs with its own permissions.
program() {
  name=$1
  shift
  if [ -n "$programs" ]; then
    "$programs/$name" "$@"
    return
  fi
  "$deno" run -q --no-prompt -P="$name" "$framework/scripts/$name.ts" "$@"
}

# status ARG…: shows a status command, runs it and shows what it says.
status() {
  show status "$@"
  program status "$@" || surprise 'the command above failed'
}

# field JSON NAME: a text, a number or the first text of a list in a line of JSON; nothing for others.
field() {
  printf '%s\n' "$1" | sed -n "
    s/.*\"$2\":\[\{0,1\}\"\([^\"]*\)\".*/\1/p
    s/.*\"$2\":\([0-9.]\{1,\}\).*/\1/p"
}

# expect WHAT TEXT PART…: fails unless TEXT holds every PART.
expect() {
  what=$1 text=$2
  shift 2
  for part; do
    case $text in
      *"$part"*) ;;
      *) surprise "$what should hold $part but is
$text" ;;
    esac
  done
}

# tick NUMBER PART…: one tick, its result in a line, and the parts that its JSON must hold.
tick() {
  number=$1
  shift
  show loop-runner --mode tick --loop demo
  output=$(program loop-runner --mode tick --loop demo --json) ||
    surprise "tick $number did not exit 0"
  line=$(printf '%s\n' "$output" | tail -n 1)
  summary "$line"
  expect "tick $number" "$line" "$@"
}

# summary JSON: what a tick did, for people.
summary() {
  case $1 in
    *'"skipped":true'*)
      halt=$(field "$1" halt_reason)
      printf 'nothing done (%s): the loop is %s%s\n' \
        "$(field "$1" reason)" "$(field "$1" status)" "${halt:+, $halt}"
      ;;
    *'"pass":true'*)
      printf '%s: pass, score %s, next %s\n' \
        "$(field "$1" phase)" "$(field "$1" score)" "$(field "$1" next_phase)"
      ;;
    *)
      printf '%s: FAIL, score %s: %s\nhint for the next try: %s\n' "$(field "$1" phase)" \
        "$(field "$1" score)" "$(field "$1" reasons)" "$(field "$1" next_hint)"
      ;;
  esac
}

# What the caller has in its environment must not steer git or the programs here.
clean_environment() {
  for word in $(env | sed -n 's/^\(AUTOMATON_[A-Z_]*\)=.*/\1/p; s/^\(GIT_[A-Z_0-9]*\)=.*/\1/p'); do
    unset "$word"
  done
  export DENO_NO_UPDATE_CHECK=1 GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
  export GIT_AUTHOR_NAME='Automaton demo' GIT_AUTHOR_EMAIL=demo@invalid
  export GIT_COMMITTER_NAME="$GIT_AUTHOR_NAME" GIT_COMMITTER_EMAIL="$GIT_AUTHOR_EMAIL"
}

# folder DIR: makes the project's folder and prints its real path.
folder() {
  case $1 in
    '') path=$(mktemp -d "${TMPDIR:-/tmp}/automaton-demo.XXXXXX") || die 'Cannot make a temporary folder' ;;
    /*) path=$1 ;;
    *) path=./$1 ;;
  esac
  mkdir -p "$path" || die "Cannot make folder \"$1\""
  if [ -n "$1" ] && [ -n "$(ls -A "$path")" ]; then
    die "Cannot use folder \"$1\": it is not empty
hint: name a folder that is empty or not there yet"
  fi
  CDPATH='' cd "$path" && pwd -P
}

# The project: one script with a defect, committed on main whatever git's default is.
project() {
  cat >greet.sh <<'END'
#!/bin/sh
set -eu
printf 'Hello, %s!\n' "$1"
END
  echo '/.automaton/' >.gitignore
  (
    set -e
    git init -q . 2>/dev/null
    git symbolic-ref HEAD refs/heads/main
    git add .
    git commit -q -m 'Greet by name'
  ) || die "Cannot make a git project in \"$PWD\""
  mkdir .automaton
  cat >.automaton/models.json <<'END'
{ "default": "scripted", "models": { "scripted": { "context_tokens": 32768, "local": false } } }
END
}

# The whole way of one task, with all that is checked on it.
story() {
  say 'A script that breaks when it is given no name.'
  show sh greet.sh
  sh greet.sh 2>&1 || :

  say 'A task, and a loop that works on it.'
  status --create-task "$TASK" --title 'Greet those who give no name'
  status --create-loop demo --from-template demo --task "$TASK"

  say 'In each tick one session works, a second one reviews, a third one moves the task on.'
  tick 1 '"skipped":false' '"phase":"research"' '"pass":true' '"next_phase":"design"'
  tick 2 '"skipped":false' '"phase":"design"' '"pass":true' '"next_phase":"spec"'
  tick 3 '"skipped":false' '"phase":"spec"' '"pass":true' '"next_phase":"human_intervention"'

  say 'No agent may approve a specification. The demo plays the person who has read it.'
  status --approve --task "$TASK"
  status --claim-loop-task demo --task "$TASK"

  say 'The first try is not good enough. Its hint reaches the second.'
  tick 4 '"skipped":false' '"phase":"implement"' '"pass":false' '"status":"running"'
  tick 5 '"skipped":false' '"phase":"implement"' '"pass":true' '"next_phase":"code_review"'

  say 'That was the fifth iteration, and this loop may have five: a brake trips.'
  tick 6 '"skipped":true' '"status":"halted"' '"halt_reason":"iterations_exhausted"'

  say 'Only a person may release it. The demo plays that person again.'
  status --approve --loop demo
  tick 7 '"skipped":false' '"phase":"code_review"' '"pass":true' '"next_phase":"bug_hunt"'
  tick 8 '"skipped":false' '"phase":"bug_hunt"' '"pass":true' '"next_phase":"complete"' \
    '"status":"complete"'
}

# What must be true at the end, asked from the programs and read from disk.
outcome() {
  say 'The repair is in a worktree of its own; the checkout beside it is as it was.'
  repaired=.automaton/loops/demo/worktree/greet.sh
  show sh "$repaired"
  greeting=$(sh "$repaired" 2>&1) || :
  printf '%s\n' "$greeting"
  status --loop-list
  expect 'the greeting' "$greeting" 'Hello, world!'
  expect 'what git says of the checkout' "[$(git status --porcelain)]" '[]'
  expect 'the task' "$(program status --task "$TASK" --json)" '"phase":"complete"'
  expect 'the loop' "$(program status --loop-list --json)" '"status":"complete"'
}

main() {
  framework=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
  command -v git >/dev/null || die 'Cannot run the demo: git was not found on PATH'
  directory=$(folder "${1-}")
  programs=${AUTOMATON_DEMO_PROGRAMS:-}
  if [ -z "$programs" ]; then
    # Deno's cache would otherwise grow in the home folder.
    export DENO_DIR="$framework/.deno/cache"
    deno=$(sh "$framework/lib/setup.sh") || die 'Cannot run the demo: lib/setup.sh failed'
  fi
  clean_environment
  cd "$directory" || die "Cannot enter folder \"$directory\""
  # Also an exit half-way says where to look.
  trap 'printf "\ndemo project: %s\n" "$directory"' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  project
  story
  outcome
}

{
  main "$@"
  exit
}
