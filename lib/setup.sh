#!/bin/sh
# first cut
set -eu
main() {
  root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
  deno=${AUTOMATON_DENO:-$(command -v deno)}
  for pkg in cli:1.0.32 fs:1.0.24 jsonc:1.0.2 path:1.1.6 assert:1.0.19; do
    name=${pkg%:*} version=${pkg#*:}
    dir=$root/vendor/jsr.io/@std/$name
    rm -rf "$dir"
    mkdir -p "$dir/$version"
    printf '{"versions":{"%s":{}}}\n' "$version" >"$dir/meta.json"
    printf '{"manifest":{},"exports":{".":"./mod.ts"}}\n' >"$dir/${version}_meta.json"
    cp "$root/lib/std/$name/mod.ts" "$dir/$version/mod.ts"
  done
  printf '%s\n' "$deno"
}
{ main "$@"; exit; }
