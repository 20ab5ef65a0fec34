#!/bin/sh
# Makes a checkout ready to run: finds or installs Deno and fills vendor/ with the @std packages.
#
# Usage: sh lib/setup.sh [--refresh]
#
# stdout: one line, the path of the Deno to use
# stderr: what was done, and where the packages come from
#
# Deno is AUTOMATON_DENO, or the first of PATH, ~/.deno/bin and <checkout>/.deno/bin that is new enough;
# else the pinned version is installed into <checkout>/.deno: by npm, or without npm from Deno's own site.
#
# The packages come from jsr.io where it answers, else from the stand-ins in lib/std. Real packages are
# kept without asking again; while stand-ins are in use every run asks, for at most five seconds.
# --refresh fetches the packages anew.
set -eu

MINIMUM_VERSION=2.6.0
PINNED_VERSION=2.9.6
DENO_SITE=https://dl.deno.land/release
LOCK_WAIT_SECONDS=180

say() {
  printf 'setup: %s\n' "$*" >&2
}

die() {
  say "$*"
  exit 1
}

# Runs a command that must succeed; $1 says what it does.
must() {
  what=$1
  shift
  "$@" || die "Cannot $what: the command \"$1\" failed"
}

has() {
  command -v "$1" >/dev/null 2>&1
}

usage() {
  sed -n '2,/^set -eu/ { /^set -eu/d; s/^# \{0,1\}//; p; }' "$0"
}

# --- Deno ---

# Prints the version of the Deno $1, nothing if it is none.
version_of() {
  "$1" --version 2>/dev/null </dev/null | sed -n '1s/^deno \([0-9][0-9.]*\).*/\1/p'
}

# Tells whether version $1 is at least the minimum.
is_new_enough() {
  awk -v have="$1" -v need="$MINIMUM_VERSION" 'BEGIN {
    split(have, h, "."); split(need, n, ".")
    for (i = 1; i <= 3; i++) if (h[i] + 0 != n[i] + 0) exit !(h[i] + 0 > n[i] + 0)
  }'
}

# Tries the program $1 and leaves its path in $deno if it will do; says why not otherwise.
try_deno() {
  [ -f "$1" ] && [ -x "$1" ] || return 1
  version=$(version_of "$1") || version=
  if [ -z "$version" ]; then
    say "passing over $1: it does not run here"
    return 1
  fi
  if ! is_new_enough "$version"; then
    say "passing over $1: version $version is older than $MINIMUM_VERSION"
    return 1
  fi
  deno=$1
  # A wrapper (npm installs one) costs its own start on every call: use what it starts.
  if [ "$(head -c 2 "$1" | tr -d '\0')" = '#!' ]; then
    real=$("$1" eval 'console.log(Deno.execPath())' 2>/dev/null </dev/null) || real=
    [ ! -x "$real" ] || deno=$real
  fi
}

# Prints the path of the command $1 on PATH, absolute.
path_of() {
  found=$(command -v "$1") || return 1
  case $found in
    /* | [A-Za-z]:*) printf '%s\n' "$found" ;;
    *) printf '%s/%s\n' "$PWD" "$found" ;;
  esac
}

find_deno() {
  if [ -n "${AUTOMATON_DENO:-}" ]; then
    named=$(path_of "$AUTOMATON_DENO") || die "Cannot use AUTOMATON_DENO \"$AUTOMATON_DENO\": no such program"
    try_deno "$named" || die "Cannot use AUTOMATON_DENO \"$AUTOMATON_DENO\": Deno $MINIMUM_VERSION or newer is needed"
    return 0
  fi
  on_path=$(path_of deno) || on_path=
  for candidate in "$on_path" "${HOME:-}/.deno/bin/deno" "$own_deno"; do
    ! try_deno "$candidate" || return 0
  done
  return 1
}

# Sets $platform and $integrity (npm), $target (site) and $exe for this machine.
find_platform() {
  machine=$(uname -m) arch=
  case $machine in
    x86_64 | amd64) machine=x64 arch=x86_64 ;;
    aarch64 | arm64) machine=arm64 arch=aarch64 ;;
  esac
  exe=
  case $(uname -s) in
    Linux)
      ! is_musl || die "Cannot install Deno: it needs glibc, and this system has musl; set AUTOMATON_DENO to a Deno that runs here"
      platform=linux-$machine-glibc target=$arch-unknown-linux-gnu
      ;;
    Darwin) platform=darwin-$machine target=$arch-apple-darwin ;;
    MINGW* | MSYS* | CYGWIN*) platform=win32-$machine target=$arch-pc-windows-msvc exe=.exe ;;
    *) platform=$(uname -s)-$machine target= ;;
  esac
  # From the registry's metadata of @deno/<platform> 2.9.6.
  case $platform in
    linux-x64-glibc) integrity=3md4TKLCuzsLDmfOoC5KN7NAZaxSVkMgm64vg6foD00JBADCpYS2/5QqXfzgnP5ZQz3iLP9vBQJtEgc116OAoQ== ;;
    linux-arm64-glibc) integrity=poqhoH9B3nYloigEMPT5t8HY+wBeiuea1An5Q7fqgJzP0SYmWsoS/oUnWO/pEiA4ofzIBy1Elt/in58xKtxEoQ== ;;
    darwin-x64) integrity=tPi3CWPRdjW1MaWlvWjORE7Ass5SADdWdj1BF1Q1PEdzi+5u/mC5YhmZzniMiPr81PpaFeqjXaLAsfb8lFsZ0Q== ;;
    darwin-arm64) integrity=V8uO1Aolrl/yvdMb5lOtgtigs8YuZBjrOrgviVMiYkQ0swymFfzkae1wZak4Xi24t7vf7d/eiMb/7ryjjVm+tg== ;;
    win32-x64) integrity=qRGnmVz/Ea6UWPht/S3xFRK17UZ/ls38DSVfgGB17fpASLxPkksqzWUI/BzL9YYoOknYzfc94mySGyInZu/JXw== ;;
    win32-arm64) integrity=iHSHs89g2Uy6k0bGHmXkgzTIW8WXImYPpvqRRO/zNsK1/N79PcjvAth1TuQatuIALcLdocstPs/PAYtndbfr0A== ;;
    *) die "Cannot install Deno: there is none for $(uname -s) on $(uname -m); set AUTOMATON_DENO to a Deno that runs here" ;;
  esac
}

is_musl() {
  case $(ldd --version 2>&1) in
    *musl*) return 0 ;;
    *) return 1 ;;
  esac
}

# Prints the base64 of the SHA-512 of file $1. npm brings node along.
sha512_of() {
  node -e '
    const hash = require("crypto").createHash("sha512");
    require("fs").createReadStream(process.argv[1])
      .on("data", (chunk) => hash.update(chunk))
      .on("end", () => console.log(hash.digest("base64")));
  ' "$1"
}

# Puts Deno into $work/deno from the npm registry.
fetch_by_npm() {
  say "installing Deno $PINNED_VERSION with npm (about 42 MB)"
  # A cache of its own: npm fails where HOME can't be written, and would keep a second copy where it can.
  (
    cd "$work" && npm_config_cache=$work/npm npm_config_update_notifier=false \
      npm pack --loglevel=error "@deno/$platform@$PINNED_VERSION" </dev/null >/dev/null
  ) || return 1
  archive=$(find "$work" -maxdepth 1 -name '*.tgz')
  [ -f "$archive" ] || return 1
  found=$(sha512_of "$archive") || die "Cannot check the downloaded Deno: node did not run"
  [ "$found" = "$integrity" ] || die "Cannot install Deno $PINNED_VERSION: the download has sha512 $found, not $integrity"
  must "unpack the downloaded Deno" tar -xzf "$archive" -C "$work"
  mv "$work/package/deno$exe" "$work/deno$exe"
}

sha256_of() {
  if has sha256sum; then
    sha256sum <"$1"
  elif has shasum; then
    shasum -a 256 <"$1"
  else
    openssl dgst -sha256 -r <"$1"
  fi | cut -c 1-64
}

# Unpacks the zip file $1 into $work.
# shellcheck disable=SC2317 # called through must
unzip_here() {
  if has unzip; then
    unzip -q -o "$1" -d "$work"
  elif has bsdtar; then
    bsdtar -xf "$1" -C "$work"
  elif has python3; then
    python3 -m zipfile -e "$1" "$work"
  elif has busybox; then
    busybox unzip -q -o "$1" -d "$work"
  else
    die "Cannot unpack the downloaded Deno: none of unzip, bsdtar, python3 and busybox is installed"
  fi
}

# Puts Deno into $work/deno from Deno's own site.
fetch_by_curl() {
  url=$DENO_SITE/v$PINNED_VERSION/deno-$target.zip
  say "installing Deno $PINNED_VERSION from $url (about 42 MB)"
  for suffix in '' .sha256sum; do
    curl -fsSL --proto '=https' --connect-timeout 15 --retry 2 -o "$work/deno.zip$suffix" "$url$suffix" </dev/null ||
      die "Cannot download Deno $PINNED_VERSION: curl failed on $url$suffix"
  done
  # The file for Windows is a table in capitals: look for the digits only.
  wanted=$(tr 'A-F' 'a-f' <"$work/deno.zip.sha256sum" | grep -Eo '[0-9a-f]{64}' | head -n 1) || wanted=
  found=$(sha256_of "$work/deno.zip")
  [ "$found" = "$wanted" ] || die "Cannot install Deno $PINNED_VERSION: the download has sha256 $found, not ${wanted:-one that the site names}"
  must "unpack the downloaded Deno" unzip_here "$work/deno.zip"
}

# Installs the pinned Deno at $own_deno: by a rename at the very end, so that a half one is never found.
install_deno() {
  find_platform
  if has npm; then
    fetch_by_npm || {
      has curl || die "Cannot download Deno $PINNED_VERSION: npm failed, and curl is not installed"
      say "npm could not download Deno"
      fetch_by_curl
    }
  elif has curl; then
    fetch_by_curl
  else
    die "Cannot install Deno $PINNED_VERSION: neither npm nor curl is installed"
  fi
  chmod 755 "$work/deno$exe"
  [ "$(version_of "$work/deno$exe")" = "$PINNED_VERSION" ] || die "Cannot install Deno $PINNED_VERSION: the downloaded program does not run here"
  mkdir -p "$root/.deno/bin"
  mv -f "$work/deno$exe" "$own_deno"
  deno=$own_deno
}

# --- Packages ---

# Prints "<name> <version>" for each @std package of deno.json.
packages() {
  sed -n 's|.*"jsr:@std/\([a-z-]*\)@\([0-9.]*\)".*|\1 \2|p' "$root/deno.json"
}

# Prints what vendor/.source holds when the packages from $1 ("jsr.io" or "lib/std") are in place.
source_line() {
  printf '%s: %s\n' "$1" "$(packages | tr '\n' ' ')"
}

is_filled_from() {
  [ "$(cat "$root/vendor/.source" 2>/dev/null)" = "$(source_line "$1")" ]
}

are_stand_ins_current() {
  is_filled_from lib/std || return 1
  packages | while read -r name version; do
    cmp -s "$root/lib/std/$name/mod.ts" "$root/vendor/jsr.io/@std/$name/$version/mod.ts" || exit 1
  done
}

# Runs lib/fetch_std.ts with the argument $1.
run_fetch_std() {
  "$deno" run --quiet --no-prompt --allow-net --allow-env=JSR_URL --allow-run \
    "$root/lib/fetch_std.ts" "$1" </dev/null >&2
}

# Asks at most once, because a firewall that swallows packets makes it slow.
does_registry_answer() {
  if [ -z "$registry_answers" ]; then
    if run_fetch_std ask; then registry_answers=yes; else registry_answers=no; fi
  fi
  [ "$registry_answers" = yes ]
}

# Fills $work/vendor from jsr.io: what is in use stays until everything is there.
fetch_packages() {
  mkdir -p "$work/lib/std"
  cp "$root/deno.json" "$work/"
  cp "$root/lib/std/mod.ts" "$work/lib/std/"
  (cd "$work" && run_fetch_std fetch) || return 1
  source_line jsr.io >"$work/vendor/.source"
}

# Fills $work/vendor with the stand-ins, laid out as Deno lays out what it downloads.
copy_stand_ins() {
  rm -rf "$work/vendor"
  packages | while read -r name version; do
    dir=$work/vendor/jsr.io/@std/$name
    mkdir -p "$dir/$version"
    printf '{"versions":{"%s":{}}}\n' "$version" >"$dir/meta.json"
    printf '{"manifest":{},"exports":{".":"./mod.ts"}}\n' >"$dir/${version}_meta.json"
    cp "$root/lib/std/$name/mod.ts" "$dir/$version/"
  done
  source_line lib/std >"$work/vendor/.source"
}

put_vendor_in_place() {
  [ ! -e "$root/vendor" ] || mv "$root/vendor" "$work/old-vendor"
  mv "$work/vendor" "$root/vendor"
}

are_packages_in_place() {
  [ "$refresh" = no ] || return 1
  ! is_filled_from jsr.io || return 0
  are_stand_ins_current && { [ ! -w "$root" ] || ! does_registry_answer; }
}

fill_vendor() {
  if does_registry_answer && fetch_packages; then
    put_vendor_in_place
  elif ! is_filled_from jsr.io && ! are_stand_ins_current; then
    copy_stand_ins
    put_vendor_in_place
  fi
}

say_source() {
  if is_filled_from jsr.io; then
    say "using the packages from jsr.io"
  else
    say "using the stand-ins from lib/std: the packages could not be had from jsr.io"
  fi
}

# --- Main ---

# Lets one setup at a time change this checkout. A lock whose owner is gone is taken over.
take_lock() {
  waited=0
  while ! mkdir "$lock" 2>/dev/null; do
    [ -d "$lock" ] || die "Cannot make folder \"$lock\""
    owner=$(cat "$lock/pid" 2>/dev/null) || owner=
    reason=
    if [ -n "$owner" ] && ! kill -0 "$owner" 2>/dev/null; then
      reason="which is gone"
    elif [ "$waited" -ge "$LOCK_WAIT_SECONDS" ]; then
      reason="which has been running for $waited seconds"
    fi
    if [ -n "$reason" ]; then
      say "taking over from setup ${owner:-(unknown)}, $reason"
      rm -rf "$lock"
      continue
    fi
    sleep 1
    waited=$((waited + 1))
  done
  has_lock=yes
  echo "$$" >"$lock/pid"
}

# shellcheck disable=SC2317 # called by a trap
clean_up() {
  [ "$has_lock" = yes ] || return 0
  rm -rf "$root/.deno/work" "$lock"
}

# Makes $work, an empty folder on the checkout's own disk, so that what is made there can be moved.
begin_work() {
  [ "$has_lock" = no ] || return 0
  mkdir -p "$root/.deno" || die "Cannot make folder \"$root/.deno\""
  lock=$root/.deno/setup.lock
  work=$root/.deno/work
  trap clean_up EXIT
  trap 'exit 129' HUP
  trap 'exit 130' INT
  trap 'exit 143' TERM
  take_lock
  rm -rf "$work"
  mkdir "$work"
}

main() {
  refresh=no has_lock=no registry_answers=
  for argument; do
    case $argument in
      --refresh) refresh=yes ;;
      -h | --help)
        usage
        return 0
        ;;
      *)
        say "Unknown argument \"$argument\"; known: --refresh, --help"
        return 2
        ;;
    esac
  done

  unset CDPATH
  root=$(cd "$(dirname "$0")/.." && pwd -P)
  own_deno=$root/.deno/bin/deno
  case $(uname -s) in
    MINGW* | MSYS* | CYGWIN*) own_deno=$own_deno.exe ;;
  esac

  if ! find_deno; then
    begin_work
    # Another setup may just have installed it.
    try_deno "$own_deno" || install_deno
  fi
  if ! are_packages_in_place; then
    begin_work
    fill_vendor
  fi
  say_source
  printf '%s\n' "$deno"
}

{
  main "$@"
  exit
}
