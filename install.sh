#!/bin/sh
# Installs Automaton in its own checkout, shows a demo of it, or takes it away again.
set -eu

SCHEDULE_SECONDS=3600

usage() {
  cat <<'END'
usage: install.sh [OPTION ...]
       install.sh --demo [DIR]
       install.sh --uninstall [--purge] [--dry-run]

Makes Deno, the packages and the three programs in bin/ ready, and the loop "self-improvement" with a
schedule. Run again, it changes only what is no longer right.

  --no-loop           make no loop
  --no-schedule       let the loop run only by hand
  --context-tokens N  write into .automaton/models.json how many tokens of context the default model has
  --require-compile   fail where the programs can't be compiled, instead of running their sources
  --prefix DIR        also link the programs into DIR/bin
  --dry-run           say what would be done, and do nothing

  --demo [DIR]        watch a loop at work in a throw-away git project: no account, no model, no GPU.
                      DIR must be empty or not there yet; without it a temporary folder is used.
                      Nothing outside DIR and the ignored folders of this checkout is touched.

  --uninstall         remove schedules, programs, links and what else install.sh made outside git.
                      Tasks and loops in .automaton/ stay.
  --purge             with --uninstall: remove .automaton/ too, with all tasks, loops and logs in it

  --help              this text
END
}

# --- Command line ---

set_mode() {
  [ "$mode" = install ] || [ "$mode" = "$1" ] || usage_error "Cannot use option \"--$mode\" with \"--$1\""
  mode=$1
}

# Fails for what --demo or --uninstall has no use for.
refuse_with() {
  [ -z "$chosen" ] || usage_error "Cannot use option \"$chosen\" with \"$1\""
}

parse_options() {
  mode=install chosen='' demo_dir='' purge=no dry_run=no
  want_loop=yes want_schedule=yes require_compile=no context_tokens='' prefix=''
  while [ $# -gt 0 ]; do
    case $1 in
      --help)
        usage
        exit 0
        ;;
      --demo)
        set_mode demo
        case ${2+set}${2-} in
          '' | set-*) ;;
          set) usage_error 'Cannot use option "--demo": its folder is empty' ;;
          *)
            demo_dir=$2
            shift
            ;;
        esac
        ;;
      --demo=?*)
        set_mode demo
        demo_dir=${1#*=}
        ;;
      --uninstall) set_mode uninstall ;;
      --purge) purge=yes ;;
      --dry-run) dry_run=yes ;;
      --no-loop) want_loop=no chosen=$1 ;;
      --no-schedule) want_schedule=no chosen=$1 ;;
      --require-compile) require_compile=yes chosen=$1 ;;
      --context-tokens | --prefix)
        [ -n "${2-}" ] || usage_error "Cannot use option \"$1\": its value is missing"
        option=$1 value=$2
        shift 2
        set -- "$option=$value" "$@"
        continue
        ;;
      --context-tokens=*)
        chosen=${1%%=*} context_tokens=${1#*=}
        case $context_tokens in
          '' | 0* | *[!0-9]* | ??????????*)
            usage_error "Cannot use option \"--context-tokens\": \"$context_tokens\" is no number of tokens"
            ;;
        esac
        ;;
      --prefix=?*) chosen=${1%%=*} prefix=${1#*=} ;;
      *) usage_error "Cannot use option \"$1\": there is no such option" ;;
    esac
    shift
  done
  case $mode in
    demo)
      refuse_with --demo
      [ "$dry_run" = no ] || usage_error 'Cannot use option "--dry-run" with "--demo"'
      ;;
    uninstall) refuse_with --uninstall ;;
  esac
  [ "$purge" = no ] || [ "$mode" = uninstall ] || usage_error 'Cannot use option "--purge" without "--uninstall"'
}

# --- What is recorded ---

# list_add LIST LINE: prints the lines with one more, unless it is there already.
list_add() {
  if [ -n "$1" ]; then printf '%s\n' "$1"; fi
  printf '%s\n' "$1" | grep -Fqx -- "$2" || printf '%s\n' "$2"
}

# record PATH…: remembers in the receipt what is about to be made.
record() {
  for path; do
    paths=$(list_add "$paths" "$path")
  done
  save_receipt
}

# Reads the receipt, and tells in $place where it comes from: from here, from where this checkout was
# before it was moved, or from another checkout, of which this one is a copy. Then the links and schedules
# belong to the other.
read_receipt() {
  form=$(receipt_field form) stamp=$(receipt_field build)
  paths=$(receipt_list paths) schedules=$(receipt_list schedules)
  loop_wanted=$(receipt_field loop_wanted) schedule_wanted=$(receipt_field schedule_wanted)
  : "${loop_wanted:=true}" "${schedule_wanted:=true}"
  before=$(receipt_field framework)
  place=here
  [ -z "$before" ] || [ "$before" = "$framework" ] || place=moved
  if [ "$place" = moved ] && [ -f "$before/.install-receipt.json" ]; then
    place=copied schedules=''
    paths=$(printf '%s\n' "$paths" | grep -v '^/') || paths=''
    say "this is a copy of $before, which keeps its links and schedules"
  fi
}

save_receipt() {
  {
    printf '{\n  "schema_version": 1,\n'
    printf '  "version": %s,\n' "$(json_text "$version")"
    printf '  "framework": %s,\n' "$(json_text "$framework")"
    printf '  "form": %s,\n' "$(json_text "$form")"
    printf '  "build": %s,\n' "$(json_text "$stamp")"
    printf '  "loop_wanted": %s,\n' "$loop_wanted"
    printf '  "schedule_wanted": %s,\n' "$schedule_wanted"
    json_list paths "$paths"
    printf ',\n'
    json_list schedules "$schedules"
    printf '\n}\n'
  } >"$receipt.new" || die "Cannot write \"$receipt\""
  if cmp -s "$receipt.new" "$receipt"; then
    rm -f "$receipt.new"
  else
    must 'write the receipt' mv -f "$receipt.new" "$receipt"
  fi
}

# --- Places ---

# Sets $framework, the real path of the folder that this script lies in, also behind links.
find_framework() {
  self=$0
  while [ -h "$self" ]; do
    target=$(readlink -- "$self")
    case $target in
      /*) self=$target ;;
      *) self=$(dirname -- "$self")/$target ;;
    esac
  done
  framework=$(CDPATH='' cd -P -- "$(dirname -- "$self")" && pwd -P)
  if [ ! -f "$framework/lib/common.sh" ]; then
    printf 'install: Cannot install from "%s": it is no checkout of Automaton\nhint: clone the repository and run its install.sh\n' \
      "$framework" >&2
    exit 1
  fi
}

check_framework() {
  case $framework$prefix in
    *[[:cntrl:]]*) die 'Cannot install in a folder with a control character in its path' 'move the checkout' ;;
  esac
  [ -w "$framework" ] ||
    die "Cannot write to the checkout \"$framework\"" 'run install.sh as its owner, or clone the repository into a folder of yours'
}

# Makes $prefix absolute and refuses it where a file of somebody else is in the way of a link.
check_prefix() {
  [ -n "$prefix" ] || return 0
  [ -z "$exe" ] || die 'Cannot use --prefix on Windows: it has no links for this' "add $bin to PATH"
  case $prefix in
    /*) ;;
    *) prefix=$PWD/$prefix ;;
  esac
  prefix=${prefix%/}
  for name in $PROGRAMS; do
    link=$prefix/bin/$name
    [ ! -e "$link" ] && [ ! -h "$link" ] || is_our_link "$link" ||
      die "Cannot link \"$link\": another file is there" 'move it away, or name another --prefix'
  done
}

# Tells whether $1 is a link to one of our programs, here or where they were before.
is_our_link() {
  [ -h "$1" ] || return 1
  leads_to=$(readlink -- "$1")
  [ "$leads_to" != "$bin/${1##*/}" ] || return 0
  [ "$place" = moved ] && [ "$leads_to" = "$before/bin/${1##*/}" ]
}

# --- Steps ---

# One install or uninstall at a time. The lock of one that is gone is taken over.
take_lock() {
  lock=$framework/.deno/install.lock
  must "make folder \"$framework/.deno\"" mkdir -p "$framework/.deno"
  if ! mkdir "$lock" 2>/dev/null; then
    owner=$(cat "$lock/pid" 2>/dev/null) || owner=
    [ -z "$owner" ] || ! is_running "$owner" ||
      die "Cannot go on: process $owner is installing here already" \
        "wait for it to end; if it is something else: rm -r $(quote "$lock")"
    rm -rf "$lock"
    must 'take the lock' mkdir "$lock"
  fi
  has_lock=yes
  echo "$$" >"$lock/pid"
}

# shellcheck disable=SC2317 # called by a trap
clean_up() {
  [ "$has_lock" = yes ] || return 0
  end_child
  remove_new_programs
  rmdir "$bin" 2>/dev/null || :
  rm -rf "$lock" "$receipt.new"
}

begin() {
  has_lock=no
  trap clean_up EXIT
  trap 'exit 129' HUP
  trap 'exit 130' INT
  trap 'exit 143' TERM
  take_lock
}

# program NAME ARG…: runs an installed program on this checkout's own tasks and loops.
program() {
  name=$1
  shift
  bounded 180 "$bin/$name$exe" "$@" --project "$framework"
}

# shown NAME: how a person calls an installed program.
shown() {
  quote "$bin/$1"
}

# make_folder DIR: makes a folder and those above it, and records each.
make_folder() {
  [ ! -d "$1" ] || return 0
  case $1 in
    */*) make_folder "${1%/*}" ;;
  esac
  must "make folder \"$1\"" mkdir "$1"
  record "$1/"
}

# make_link LINK: links the program of that name.
make_link() {
  [ "$(readlink -- "$1" 2>/dev/null)" != "$bin/${1##*/}" ] || return 0
  rm -f "$1"
  must "link \"$1\"" ln -s "$bin/${1##*/}" "$1"
}

link_programs() {
  printf '%s\n' "$paths" | while IFS= read -r path; do
    case $path in
      */) ;;
      /*) if is_our_link "$path"; then make_link "$path"; fi ;;
    esac
  done
  [ -n "$prefix" ] || return 0
  make_folder "$prefix/bin"
  for name in $PROGRAMS; do
    record "$prefix/bin/$name"
    make_link "$prefix/bin/$name"
  done
  case :$PATH: in
    *":$prefix/bin:"*) ;;
    *) hint "add $prefix/bin to PATH: export PATH=$(quote "$prefix/bin"):\"\$PATH\"" ;;
  esac
}

# The folder of tasks and loops; recorded only when it is made here, so that --purge keeps a person's own.
make_automaton() {
  [ -d "$automaton" ] || {
    record .automaton
    must "make folder \"$automaton\"" mkdir "$automaton"
  }
}

write_context() {
  [ -n "$context_tokens" ] || return 0
  make_automaton
  "$deno" run -q --no-prompt --allow-read --allow-write="$automaton" "$framework/lib/set_context.ts" \
    "$context_tokens" "$automaton/models.json" </dev/null ||
    die 'Cannot use --context-tokens: see above' "mend $automaton/models.json"
  say "the default model has $context_tokens tokens of context ($automaton/models.json)"
  [ "$context_tokens" -ge 16000 ] || say 'no loop will run with it: loops need 16000 tokens or more'
}

# Every version so far writes schema 1. One that changes it brings older states up to date here.
check_states() {
  [ -d "$automaton" ] || return 0
  find "$automaton" -name worktree -prune -o \( -name .state -o -name .state.loop \) -type f -print | {
    count=0
    while IFS= read -r file; do
      schema=$(sed -n 's/.*"schema_version": *\([0-9]\{1,\}\).*/\1/p' "$file" | head -n 1)
      case $schema in
        1) count=$((count + 1)) ;;
        '') say "\"$file\" names no schema version: it is left as it is" ;;
        *) say "\"$file\" is of schema $schema, which this version does not know: it is left as it is" ;;
      esac
    done
    [ "$count" -eq 0 ] || say "states of tasks and loops that need no change: $count"
  }
}

# In a copy, the records of schedules are those of the other checkout, which must not be removed by them.
put_records_aside() {
  for file in "$automaton"/loops/*/schedule.json; do
    [ ! -f "$file" ] || must "put \"$file\" aside" mv -f "$file" "$file.copied"
  done
}

make_loop() {
  loop_dir=$automaton/loops/$LOOP
  if [ "$want_loop" = no ]; then
    [ -d "$loop_dir" ] || loop_wanted=false
    return
  fi
  loop_wanted=true
  if [ -d "$loop_dir" ]; then
    say "the loop $LOOP is there already"
    return 0
  fi
  make_automaton
  program status --create-loop "$LOOP" --from-template "$LOOP" >&2 || {
    say "the loop $LOOP could not be made; everything else goes on"
    hint "$(shown status) --create-loop $LOOP --from-template $LOOP --project $(quote "$framework")"
  }
}

make_schedule() {
  if [ "$want_schedule" = no ]; then
    [ -f "$loop_dir/schedule.json" ] || schedule_wanted=false
    return
  fi
  schedule_wanted=true
  [ "$want_loop" = yes ] && [ -d "$loop_dir" ] || return 0
  # A schedule leads to the checkout, so one that was moved needs it anew.
  if [ -f "$loop_dir/schedule.json" ] && [ "$place" != moved ]; then
    say "the loop $LOOP has a schedule already"
    return 0
  fi
  case $(program status --can-continue "$LOOP" --json) in
    *'"state":"OK"'*) ;;
    *)
      say "the loop $LOOP does not run now (paused, halted or complete), so it gets no schedule"
      hint "$(shown status) --loop-list --project $(quote "$framework")"
      return 0
      ;;
  esac
  if program status --install-schedule "$LOOP" --interval "$SCHEDULE_SECONDS" >&2; then
    schedules=$(list_add "$schedules" "$LOOP")
    save_receipt
    [ "$(id -u)" != 0 ] || say 'the agent of the loop runs as root; a user of its own would be safer'
  else
    say "the loop $LOOP has no schedule; it runs only by hand"
    hint "$(shown status) --install-schedule $LOOP --interval $SCHEDULE_SECONDS --project $(quote "$framework")"
  fi
}

# What the doctor finds is said; it does not undo an installation.
ask_doctor() {
  if [ -d "$automaton" ]; then
    program status --doctor
  else
    (cd / && bounded 180 "$bin/status$exe" --doctor)
  fi || say 'the doctor found something to mend: see above'
}

describe_loop() {
  if [ ! -d "$loop_dir" ]; then
    echo 'none'
  elif [ -f "$loop_dir/schedule.json" ]; then
    echo "$LOOP, on a schedule"
  else
    echo "$LOOP, only by hand"
  fi
}

say_done() {
  cat <<END

Automaton $version is installed in $framework
  programs  $bin ($form)
  Deno      $deno
  loop      $(describe_loop)

To try next:
  $(quote "$framework/install.sh") --demo
  $(shown status) --help
  $(next_command)
END
}

# What to look at once the programs are there: the loop's next tick, or how to make a loop.
next_command() {
  if [ -d "$loop_dir" ]; then
    echo "$(shown loop-runner) --mode tick --loop $LOOP --dry-run --project $(quote "$framework")"
  else
    echo "$(shown status) --create-loop NAME --from-template ci-triage --project DIR"
  fi
}

# --- Modes ---

plan_install() {
  cat <<END
install.sh would do this in $framework:
  find Deno, or install it into .deno/, and fill vendor/ with the @std packages
  compile $PROGRAMS into bin/, or write launchers there
END
  [ -z "$prefix" ] || echo "  link the programs into $prefix/bin"
  [ -z "$context_tokens" ] || echo "  set context_tokens of the default model in .automaton/models.json to $context_tokens"
  if [ "$want_loop" = no ]; then
    echo '  make no loop'
  elif [ -d "$automaton/loops/$LOOP" ]; then
    echo "  leave the loop $LOOP as it is"
  else
    echo "  make the loop $LOOP in .automaton/"
  fi
  if [ "$want_loop$want_schedule" = yesyes ] && [ ! -f "$automaton/loops/$LOOP/schedule.json" ]; then
    echo "  wake it every $SCHEDULE_SECONDS seconds with the scheduler of this system"
  fi
  echo '  write .install-receipt.json, which install.sh --uninstall goes by'
}

run_install() {
  read_receipt
  check_prefix
  if [ "$dry_run" = yes ]; then
    plan_install
    return
  fi
  check_framework
  begin
  [ "$place" != copied ] || put_records_aside
  record .deno vendor
  keep_cache_here
  deno=$(sh "$framework/lib/setup.sh") ||
    die 'Cannot make Deno ready: see above' 'name a Deno 2.6 or newer: AUTOMATON_DENO=/path/to/deno ./install.sh'
  record bin/loop-runner"$exe" bin/status"$exe" bin/vram-detect"$exe" bin/
  build_programs
  save_receipt
  link_programs
  write_context
  check_states
  make_loop
  make_schedule
  save_receipt
  has git || say 'git was not found: loops need it to work on a branch of their own'
  ask_doctor
  say_done
}

has_schedule() {
  [ "$place" != copied ] && [ -f "$automaton/loops/$1/schedule.json" ]
}

# unschedule LOOP: takes a loop's schedule away, as it is recorded.
unschedule() {
  has_schedule "$1" || return 0
  say "removing the schedule of loop $1"
  program status --uninstall-schedule "$1" >&2 ||
    die "Cannot remove the schedule of loop \"$1\": see above; the programs stay until it is gone" \
      "run install.sh --uninstall again, or remove the entry by hand and then $(quote "$automaton/loops/$1/schedule.json")"
}

# Lists the loops of this checkout, and those that the receipt names.
list_loops() {
  {
    [ -z "$schedules" ] || printf '%s\n' "$schedules"
    for dir in "$automaton"/loops/*/; do
      [ ! -f "$dir/loop.json" ] || basename "$dir"
    done
  } | sort -u
}

# Removes all loops, the way that gives back their worktrees, and then what is left.
purge_automaton() {
  [ -d "$automaton" ] || return 0
  if [ "$place" = copied ] || ! printf '%s\n' "$paths" | grep -Fqx .automaton; then
    say 'keeping .automaton: it was not made by install.sh here'
    return 0
  fi
  for loop in $(list_loops); do
    [ ! -d "$automaton/loops/$loop" ] || program status --remove-loop "$loop" --purge >&2 ||
      die "Cannot remove loop \"$loop\": see above; nothing of .automaton was lost" \
        "save its work, or lose it with: $(shown status) --remove-loop $loop --purge --force --project $(quote "$framework")"
  done
  must "remove \"$automaton\"" rm -rf "$automaton"
}

# remove_path PATH: removes what the receipt lists, if it is still ours.
remove_path() {
  case $1 in
    .automaton) ;;
    */../*) say "keeping $1: install.sh makes no such path" ;;
    .deno | vendor) rm -rf "${framework:?}/$1" ;;
    bin/) rmdir "$bin" 2>/dev/null || : ;;
    bin/*) rm -f "${framework:?}/$1" ;;
    /*/)
      # Somebody else may have put something into the folder.
      rmdir "${1%/}" 2>/dev/null || :
      ;;
    /*) if is_our_link "$1"; then rm -f "$1"; elif [ -e "$1" ]; then say "keeping $1: it is no link of ours"; fi ;;
    *) say "keeping $1: install.sh makes no such path" ;;
  esac
}

run_uninstall() {
  if [ ! -f "$receipt" ]; then
    say 'nothing to uninstall: there is no .install-receipt.json here'
    return 0
  fi
  [ "$(receipt_field schema_version)" = 1 ] ||
    die "Cannot read \"$receipt\"" 'mend it, or run install.sh again, which writes it anew'
  read_receipt
  if [ "$dry_run" = yes ]; then
    echo "install.sh --uninstall would remove from $framework:"
    for loop in $(list_loops); do
      ! has_schedule "$loop" || echo "  the schedule of loop $loop"
    done
    [ "$purge" = no ] || printf '%s\n' "$paths" | sed -n 's/^\.automaton$/  .automaton, with all tasks, loops and logs/p'
    printf '%s\n' "$paths" | sed '/^\.automaton$/d; s/^/  /'
    return 0
  fi
  check_framework
  begin
  for loop in $(list_loops); do
    unschedule "$loop"
  done
  [ "$purge" = no ] || purge_automaton
  remove_new_programs
  # In reverse, what is in a folder comes before the folder.
  printf '%s\n' "$paths" | LC_ALL=C sort -r | while IFS= read -r path; do
    remove_path "$path"
  done
  rm -f "$receipt"
  say 'Automaton is uninstalled; the checkout itself stays'
  [ ! -d "$automaton" ] || say "tasks and loops stay in $automaton"
}

main() {
  tool=install
  find_framework
  # shellcheck source=lib/common.sh
  . "$framework/lib/common.sh"
  # shellcheck source=lib/build.sh
  . "$framework/lib/build.sh"
  parse_options "$@"
  if [ "$mode" = demo ]; then
    exec sh "$framework/lib/demo.sh" "$demo_dir"
  fi
  leave_loops_alone
  bin=$framework/bin automaton=$framework/.automaton exe=
  case $(uname -s) in
    MINGW* | MSYS* | CYGWIN*) exe=.exe ;;
  esac
  version=$(sed -n 's/^version: *//p' "$framework/config.md")
  case $mode in
    install) run_install ;;
    uninstall) run_uninstall ;;
  esac
}

{
  main "$@"
  exit
}
