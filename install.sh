#!/bin/sh
# Entry point of a fresh checkout. So far it runs the demo; installing for good is not part of it yet.
set -eu

usage() {
  cat <<'END'
usage: install.sh --demo [DIR]
       install.sh --help

  --demo [DIR]  watch a loop at work in a throw-away git project: no account, no model, no GPU.
                DIR must be empty or not there yet; without it a temporary folder is used.
                Nothing outside DIR and the ignored folders of this checkout is touched.
END
}

# usage_error MESSAGE: says what is wrong with the call and exits 2.
usage_error() {
  printf '%s\nhint: ./install.sh --help\n' "$1" >&2
  exit 2
}

main() {
  framework=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
  demo='' demo_dir=''
  [ $# -gt 0 ] || usage_error 'Cannot install "everything": this version only has --demo'
  while [ $# -gt 0 ]; do
    case $1 in
      --help)
        usage
        return
        ;;
      --demo)
        demo=yes
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
        demo=yes
        demo_dir=${1#*=}
        ;;
      --no-loop | --no-schedule | --context-tokens* | --require-compile | --dry-run | --uninstall | --prefix*)
        usage_error "Cannot use option \"$1\": this version only has --demo"
        ;;
      *) usage_error "Cannot use option \"$1\": known are --demo and --help" ;;
    esac
    shift
  done
  if [ -n "$demo" ]; then
    sh "$framework/lib/demo.sh" "$demo_dir"
  fi
}

{
  main "$@"
  exit
}
