# Shell functions that install.sh and update.sh share. To be sourced: nothing runs here. The caller has
# set $tool, the name its messages begin with, and $framework, the real path of the checkout.
# shellcheck shell=sh
# shellcheck disable=SC2034 # used by the caller

PROGRAMS='loop-runner status vram-detect'
LOOP=self-improvement
receipt=${framework:?}/.install-receipt.json

# --- Messages ---

say() {
  printf '%s: %s\n' "${tool:?}" "$*" >&2
}

# hint COMMAND: what to do next.
hint() {
  printf 'hint: %s\n' "$1" >&2
}

# die MESSAGE [HINT]: ends with exit code 1.
die() {
  say "$1"
  [ $# -lt 2 ] || hint "$2"
  exit 1
}

# usage_error MESSAGE: says what is wrong with the call and exits 2.
usage_error() {
  say "$1"
  hint "./$tool.sh --help"
  exit 2
}

# must WHAT COMMAND…: runs a command that has to succeed.
must() {
  what=$1
  shift
  "$@" || die "Cannot $what: the command \"$1\" failed"
}

has() {
  command -v "$1" >/dev/null 2>&1
}

# quote TEXT: the text as one word of sh.
quote() {
  case $1 in
    '' | *[!A-Za-z0-9_./=:@%+,-]*) printf '%s\n' "$1" | LC_ALL=C sed "s/'/'\\\\''/g; s/^/'/; s/\$/'/" ;;
    *) printf '%s\n' "$1" ;;
  esac
}

# --- Processes ---

# The process that bounded waits for; whoever ends early has to end it.
child=

# bounded SECONDS COMMAND…: runs a command and ends it when it takes longer, with exit code 124.
# timeout(1) is not everywhere, and would take the command out of the reach of Ctrl-C.
bounded() {
  deadline=$(($(date +%s) + $1))
  shift
  "$@" </dev/null &
  child=$!
  while kill -0 "$child" 2>/dev/null; do
    if [ "$(date +%s)" -ge "$deadline" ]; then
      end_child
      return 124
    fi
    sleep 0.1 2>/dev/null || sleep 1
  done
  result=0
  wait "$child" || result=$?
  child=
  return "$result"
}

end_child() {
  [ -n "$child" ] || return 0
  kill "$child" 2>/dev/null || :
  wait "$child" 2>/dev/null || :
  child=
}

# Tells whether process $1 runs. One that has ended keeps its id where nobody waits for it, as in a
# container without init.
is_running() {
  kill -0 "$1" 2>/dev/null || return 1
  case $(sed 's/^.*) //' "/proc/$1/stat" 2>/dev/null) in
    Z*) return 1 ;;
    *) return 0 ;;
  esac
}

# What the caller's environment says of other checkouts and of a tick must not steer this one. A session
# of a loop may install nothing: it would give itself a schedule.
leave_loops_alone() {
  [ -z "${AUTOMATON_ROLE:-}${AUTOMATON_LOOP:-}" ] ||
    die "Cannot run in a session of loop \"${AUTOMATON_LOOP:-}\": only a person installs, updates and uninstalls"
  unset AUTOMATON_HOME AUTOMATON_PROJECT AUTOMATON_TASK AUTOMATON_OP_FILE AUTOMATON_NO_LOOP_LOCK
}

# Deno's cache would otherwise grow in the home folder.
keep_cache_here() {
  export DENO_DIR="${DENO_DIR:-$framework/.deno/cache}" DENO_NO_UPDATE_CHECK=1
}

# --- Receipt ---
# .install-receipt.json, one value a line, so that sh can read back what it wrote. `paths` holds what lies
# outside git, relative to the checkout or, for links and their folders, absolute; a folder that is only
# removed when it is empty ends in "/".

unescape_json() {
  LC_ALL=C sed 's/\\\(.\)/\1/g'
}

# receipt_field NAME: a value of the receipt; nothing where it is missing.
receipt_field() {
  [ -f "$receipt" ] || return 0
  LC_ALL=C sed -n "s/^  \"$1\": \"\(.*\)\",\$/\1/p; s/^  \"$1\": \([a-z0-9]*\),\$/\1/p" "$receipt" | unescape_json
}

# receipt_list NAME: the texts of a list of the receipt, one a line.
receipt_list() {
  [ -f "$receipt" ] || return 0
  LC_ALL=C sed -n "/^  \"$1\": \[\$/,/^  \]/ s/^    \"\(.*\)\"\$/\1/p; /^  \"$1\": \[\$/,/^  \]/ s/^    \"\(.*\)\",\$/\1/p" "$receipt" | unescape_json
}

json_text() {
  printf '%s\n' "$1" | LC_ALL=C sed 's/[\\"]/\\&/g; s/^/"/; s/$/"/'
}

# json_list NAME LINES: a list as the receipt holds it.
json_list() {
  if [ -z "$2" ]; then
    printf '  "%s": []' "$1"
  else
    printf '  "%s": [\n' "$1"
    printf '%s\n' "$2" | LC_ALL=C sed 's/[\\"]/\\&/g; s/^/    "/; s/$/"/; $!s/$/,/'
    printf '  ]'
  fi
}
