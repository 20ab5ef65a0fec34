# Shell functions of install.sh that make bin/. To be sourced after common.sh: nothing runs here. The
# caller has set $framework, $bin, $deno, $exe (".exe" on Windows) and DENO_DIR.
# shellcheck shell=sh
# shellcheck disable=SC2034 # used by the caller

COMPILE_SECONDS=600
SELF_TEST_SECONDS=60
PROBE_SECONDS=10

# new_program NAME: where a program is made, before it takes the place of the one in use.
new_program() {
  printf '%s/.%s.new%s\n' "${bin:?}" "$1" "${exe?}"
}

remove_new_programs() {
  for name in $PROGRAMS; do
    rm -f "$bin/.$name.new"* "$bin/.$name.old"*
  done
  rm -f "$bin/.log"
}

# find_compiler: sets $compiler, the Deno to compile with.
find_compiler() {
  compiler=${AUTOMATON_COMPILE_DENO:-${deno:?}}
  "$compiler" --version >/dev/null 2>&1 </dev/null ||
    die "Cannot compile with AUTOMATON_COMPILE_DENO \"$compiler\": it does not run" \
      'unset AUTOMATON_COMPILE_DENO, or name a Deno with it'
  # A machine without access to Deno's site may have the base lie beside Deno.
  if [ -z "${DENORT_BIN:-}" ] && [ -f "${compiler%/*}/denort$exe" ]; then
    export DENORT_BIN="${compiler%/*}/denort$exe"
  fi
}

# can_have_base: tells whether "deno compile" can have the program that it puts a script into: from
# DENORT_BIN, from an earlier time, or from Deno's site. Says why not in $reason.
can_have_base() {
  if [ -n "${DENORT_BIN:-}" ]; then
    [ ! -f "$DENORT_BIN" ] || return 0
    reason="DENORT_BIN names \"$DENORT_BIN\", which is no file"
    return 1
  fi
  deno_version=$("$compiler" --version </dev/null | sed -n '1s/^deno \([0-9.]*\).*/\1/p')
  for base in "${DENO_DIR:?}/dl/release/v$deno_version"/denort-*; do
    [ ! -f "$base" ] || return 0
  done
  # Asked first, since a firewall that swallows packets would have compile wait for minutes.
  if bounded "$PROBE_SECONDS" "$compiler" eval \
    'await (await fetch("https://dl.deno.land/release-latest.txt")).text()' >/dev/null 2>&1; then
    return 0
  fi
  reason="Deno's site, which has what is needed for it, does not answer"
  return 1
}

# last_cause: the innermost cause of a failure that Deno tells in the log.
last_cause() {
  sed -n '/^Stack backtrace/q; s/^error: //p; s/^ *[0-9]*: //p' "$bin/.log" | tail -n 1
}

# test_program NAME: the new program must start anywhere, with nothing in its environment.
test_program() {
  if [ -z "$exe" ]; then set -- "$1" env -i; else set -- "$1" env; fi
  name=$1
  shift
  # shellcheck disable=SC2016 # expanded by the inner sh
  bounded "$SELF_TEST_SECONDS" sh -c 'cd / && exec "$@" --version' sh "$@" "$(new_program "$name")" \
    >"$bin/.log" 2>&1 && [ "$(cat "$bin/.log")" = "$name ${version:?}" ]
}

# compile_programs: makes new programs; says in $reason why it could not.
compile_programs() {
  can_have_base || return 1
  for name in $PROGRAMS; do
    say "compiling $name"
    bounded "$COMPILE_SECONDS" env NO_COLOR=1 "$compiler" compile -q -P="$name" --deny-import --no-prompt --no-check \
      --no-code-cache --output "$(new_program "$name")" "${framework:?}/scripts/$name.ts" >"$bin/.log" 2>&1 || {
      reason="\"deno compile\" failed on $name: $(last_cause)"
      return 1
    }
    test_program "$name" || {
      reason="the compiled $name does not run here: $(head -n 1 "$bin/.log")"
      return 1
    }
  done
}

# write_launchers: makes new programs that run the sources, each lib/launcher.sh with its values.
write_launchers() {
  [ -z "$exe" ] || die "Cannot make programs: $reason" 'on Windows they have to be compiled; set DENORT_BIN'
  # A Deno in the checkout is found from there, so that the checkout can be moved.
  case $deno in
    "$framework"/*) recorded= ;;
    *) recorded=$(quote "$deno") ;;
  esac
  for name in $PROGRAMS; do
    NAME_LINE="name=$name" DENO_LINE="recorded_deno=$recorded" awk '
      $0 == "name=" { print ENVIRON["NAME_LINE"]; next }
      $0 == "recorded_deno=" { print ENVIRON["DENO_LINE"]; next }
      { print }' "$framework/lib/launcher.sh" >"$(new_program "$name")"
    must "make $name executable" chmod 755 "$(new_program "$name")"
    test_program "$name" || die "Cannot start $name: $(head -n 1 "$bin/.log")"
  done
}

# put_in_place: the new programs take the place of the old ones by a rename each. A tick that runs keeps
# the file that it was started from.
put_in_place() {
  for name in $PROGRAMS; do
    new=$(new_program "$name")
    ! cmp -s "$new" "$bin/$name$exe" || continue
    # Windows replaces no file that runs, but lets it be renamed.
    [ -z "$exe" ] || [ ! -e "$bin/$name$exe" ] || must "put $name aside" mv -f "$bin/$name$exe" "$bin/.$name.old$$"
    must "put $name in place" mv -f "$new" "$bin/$name$exe"
  done
}

# build_stamp: changes when anything changes that a compiled program is made of.
build_stamp() {
  {
    "$compiler" --version
    ls -ln "${DENORT_BIN:-$compiler}" 2>/dev/null || :
    cat "$framework"/scripts/*.ts "$framework/deno.json" "$framework/lib/build.sh"
    find "$framework/vendor/jsr.io" -type f -name '*.ts' -exec cat {} +
  } | cksum
}

# are_programs_current STAMP: tells whether bin/ holds what compile would make again.
are_programs_current() {
  [ "$(receipt_field form)" = compiled ] && [ "$(receipt_field build)" = "$1" ] || return 1
  for name in $PROGRAMS; do
    [ -x "$bin/$name$exe" ] || return 1
  done
}

# build_programs: fills bin/ and sets $form (compiled or launchers) and $stamp.
build_programs() {
  find_compiler
  stamp=$(build_stamp) form=compiled reason=
  if are_programs_current "$stamp"; then
    say 'the compiled programs are up to date'
    return 0
  fi
  must "make folder \"$bin\"" mkdir -p "$bin"
  if ! compile_programs; then
    [ "${require_compile:?}" = no ] || die "Cannot compile the programs: $reason" \
      'leave out --require-compile, or set DENORT_BIN to a denort of the version of Deno'
    say "the programs are launchers that run their sources, since $reason"
    form=launchers
    write_launchers
  fi
  put_in_place
}
