#!/bin/sh
# Runs one of the programs from its source, where it could not be compiled. install.sh copies this file
# to bin/<name> with the two values filled in.
set -eu

name=
recorded_deno=

# Tells whether $1 is a Deno that knows permission sets: 2.6 or newer.
is_usable() {
  [ -x "$1" ] || return 1
  case $("$1" --version 2>/dev/null </dev/null) in
    'deno '[01].* | 'deno 2.'[0-5].*) return 1 ;;
    'deno '*) return 0 ;;
    *) return 1 ;;
  esac
}

# Looks for another Deno when the one of the installation is gone.
find_deno() {
  on_path=$(command -v deno) || on_path=
  for candidate in "${AUTOMATON_DENO:-}" "$on_path" "${HOME:-}/.deno/bin/deno" "$framework/.deno/bin/deno"; do
    ! is_usable "$candidate" || {
      deno=$candidate
      return 0
    }
  done
  return 1
}

main() {
  self=$0
  case $self in
    */*) ;;
    *) if [ -f "$self" ]; then self=./$self; else self=$(command -v -- "$self"); fi ;;
  esac
  while [ -h "$self" ]; do
    target=$(readlink -- "$self")
    case $target in
      /*) self=$target ;;
      *) self=${self%/*}/$target ;;
    esac
  done
  framework=$(CDPATH='' cd -P -- "${self%/*}/.." && pwd -P)
  deno=${recorded_deno:-$framework/.deno/bin/deno}
  if [ ! -x "$deno" ] && ! find_deno; then
    printf '%s: Cannot start: the Deno of the installation, "%s", is gone\nhint: run install.sh again in %s\n' \
      "$name" "$deno" "$framework" >&2
    exit 1
  fi
  # The cache stays in the checkout, as everything that the programs need.
  export DENO_DIR="${DENO_DIR:-$framework/.deno/cache}" DENO_NO_UPDATE_CHECK=1
  exec "$deno" run -q --no-prompt -P="$name" --cached-only "$framework/scripts/$name.ts" "$@"
}

{
  main "$@"
  exit
}
