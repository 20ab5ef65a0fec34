#!/bin/sh
# Brings a checkout of Automaton to the newest version of its branch, and what is installed with it.
set -eu

FETCH_SECONDS=300

usage() {
  cat <<'END'
usage: update.sh [--require-compile] [--dry-run]

Fetches the branch that is checked out, moves the checkout forward and installs again: programs are made
anew, and the loop "self-improvement" is made where there is none. Loops that are there stay as they are,
paused or not, and a tick that runs is not disturbed. A checkout with changes or commits of its own is
refused. Where the new version cannot be installed, the checkout goes back and the programs stay.

  --require-compile  fail where the programs can't be compiled
  --dry-run          say what would be done, and do nothing
  --help             this text
END
}

parse_options() {
  dry_run=no require_compile=no
  for option; do
    case $option in
      --help)
        usage
        exit 0
        ;;
      --require-compile) require_compile=yes ;;
      --dry-run) dry_run=yes ;;
      *) usage_error "Cannot use option \"$option\": there is no such option" ;;
    esac
  done
}

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
    printf 'update: Cannot update "%s": it is no checkout of Automaton\nhint: clone the repository and run its install.sh\n' \
      "$framework" >&2
    exit 1
  fi
}

in_checkout() {
  git -C "$framework" "$@"
}

# git_hint WORDS: a git command for a person to type.
git_hint() {
  printf 'git -C %s %s\n' "$(quote "$framework")" "$1"
}

# check_checkout: sets $branch, $upstream and $old, or says why this checkout can't be moved forward.
check_checkout() {
  has git || die 'Cannot update: git was not found on PATH' 'install git'
  top=$(in_checkout rev-parse --show-toplevel) ||
    die "Cannot update \"$framework\": it is no git checkout" 'clone the repository and run its install.sh'
  [ "$(CDPATH='' cd -P -- "$top" && pwd -P)" = "$framework" ] ||
    die "Cannot update \"$framework\": it belongs to the git checkout \"$top\"" 'clone the repository and run its install.sh'
  branch=$(in_checkout symbolic-ref -q --short HEAD) ||
    die 'Cannot update: no branch is checked out' "$(git_hint 'switch main')"
  upstream=$(in_checkout rev-parse -q --verify --abbrev-ref '@{upstream}' 2>/dev/null) ||
    die "Cannot update: branch \"$branch\" follows no branch of a remote" \
      "$(git_hint "branch --set-upstream-to=origin/$branch")"
  changed=$(in_checkout status --porcelain --untracked-files=no)
  [ -z "$changed" ] || die "Cannot update: the checkout has changes of its own:
$changed" "$(git_hint stash), ./update.sh, $(git_hint 'stash pop')"
  old=$(in_checkout rev-parse HEAD)
}

# short COMMIT: a commit as people read it.
short() {
  in_checkout log -1 --format='%h (%s)' "$1"
}

say_plan() {
  remote=$(in_checkout config "branch.$branch.remote")
  merge=$(in_checkout config "branch.$branch.merge")
  newest=$(in_checkout ls-remote "$remote" "$merge" | cut -f 1)
  if [ "$newest" = "$old" ]; then
    echo "update.sh would find nothing new in $upstream and install $(short "$old") again"
  else
    echo "update.sh would go from $(short "$old") to ${newest:-nothing: $upstream is gone} of $upstream and install it"
  fi
}

# fetch: sets $new, the newest commit of the branch.
fetch() {
  say "fetching $upstream"
  bounded "$FETCH_SECONDS" git -C "$framework" fetch --quiet ||
    die "Cannot fetch $upstream: see above; nothing was changed" 'check the network, then run update.sh again'
  new=$(in_checkout rev-parse -q --verify '@{upstream}') ||
    die "Cannot update: $upstream is gone from the remote" "$(git_hint 'branch --set-upstream-to=REMOTE/BRANCH')"
}

# go_forward: moves the checkout to $new, if nothing of its own is lost by it.
go_forward() {
  if in_checkout merge-base --is-ancestor "$new" "$old"; then
    new=$old
    say "nothing new in $upstream"
    return
  fi
  in_checkout merge-base --is-ancestor "$old" "$new" ||
    die "Cannot update: branch \"$branch\" has commits that $upstream has not, and the other way round" \
      "$(git_hint "rebase $upstream"), then ./update.sh"
  must "move the checkout to $(short "$new")" git -C "$framework" merge --quiet --ff-only "$new" >&2
}

# install_again: lets install.sh of the new version do the rest, with what the person once chose.
install_again() {
  set --
  [ "$require_compile" = no ] || set -- "$@" --require-compile
  if [ -d "$framework/.automaton/loops/$LOOP" ]; then
    set -- "$@" --no-schedule
  elif [ "$(receipt_field loop_wanted)" = false ]; then
    set -- "$@" --no-loop
  elif [ "$(receipt_field schedule_wanted)" = false ]; then
    set -- "$@" --no-schedule
  fi
  sh "$framework/install.sh" "$@"
}

# go_back: puts the sources of before under the programs of before.
go_back() {
  [ "$new" != "$old" ] || die 'Cannot update: what is here could not be installed again, see above' \
    'mend what is said above, then run update.sh again'
  must "move the checkout back to $old" git -C "$framework" reset --quiet --keep "$old"
  sh "$framework/lib/setup.sh" >/dev/null || say 'the packages of before could not be had: see above'
  die "Cannot update to $(short "$new"): it could not be installed, see above; the checkout is back at $(short "$old")" \
    'run update.sh again when what is said above is mended'
}

main() {
  tool=update
  find_framework
  # shellcheck source=lib/common.sh
  . "$framework/lib/common.sh"
  parse_options "$@"
  leave_loops_alone
  keep_cache_here
  check_checkout
  if [ "$dry_run" = yes ]; then
    say_plan
    return
  fi
  trap end_child EXIT
  trap 'exit 129' HUP
  trap 'exit 130' INT
  trap 'exit 143' TERM
  fetch
  go_forward
  install_again || go_back
  if [ "$new" = "$old" ]; then
    say "$(short "$old") is the newest version"
  else
    say "updated from $(short "$old") to $(short "$new")"
  fi
}

{
  main "$@"
  exit
}
