#!/bin/sh
# The demo's agent: it plays all three sessions of a tick without a model. What it does follows from
# the prompt on its standard input and the files it finds, as with a real agent.
#
#   agent.sh ROLE TASK PHASE TASK_DIR <PROMPT
set -eu

# section TITLE: the lines of the prompt below the heading "## TITLE…", up to the next heading.
section() {
  printf '%s\n' "$prompt" | awk -v title="## $1" '
    /^## / { inside = index($0, title) == 1; next }
    inside'
}

# document FILE: writes standard input to FILE in the task's folder.
document() {
  cat >"$task_dir/$1"
  printf 'Wrote %s.\n' "$1"
}

# The first try only stops the crash. The name to fall back to is known from a review's hint alone.
repair() {
  name=$(section 'What the last review asked for' |
    sed -n 's/.*fall back to the name \([a-z][a-z]*\).*/\1/p' | head -n 1)
  # shellcheck disable=SC2016 # the dollar signs belong to greet.sh
  printf '#!/bin/sh\nset -eu\nprintf '\''Hello, %%s!\\n'\'' "${1:-%s}"\n' "$name" >greet.sh
  document IMPLEMENTATION.md <<END
# Implementation
- R1: unchanged.
- R2: greet.sh falls back to ${name:-an empty name} when it gets no argument.
END
}

implement() {
  case $phase in
    research)
      document RESEARCH.md <<'END'
# Research
greet.sh greets the name in its first argument. Without one, the shell stops it: the argument is not set.
Only greet.sh is concerned.
END
      ;;
    design)
      document DESIGN.md <<'END'
# Design
Give the first argument a default value. Rejected: an error message, because a greeter should greet.
END
      ;;
    spec)
      document SPEC.md <<'END'
# Specification
- R1: with a name, greet.sh prints "Hello, NAME!" as before.
- R2: without a name, greet.sh greets somebody and exits 0.
END
      ;;
    implement) repair ;;
    code_review)
      document CODE_REVIEW.md <<'END'
# Code review
One line of greet.sh has changed, the value is quoted, and nothing needs to be fixed.
END
      ;;
    bug_hunt)
      document BUG_REPORT.md <<'END'
# Bug report
Tried: no name, an empty name, a name with spaces. No open defect.
END
      ;;
    *) unknown "phase $phase" ;;
  esac
}

# verdict PASS SCORE REASON HINT: the answer, with the nonce that this prompt gave.
verdict() {
  nonce=$(printf '%s\n' "$prompt" | sed -n 's/^"nonce": "\(.*\)"$/\1/p' | tail -n 1)
  printf '{"pass":%s,"score":%s,"reasons":["%s"],"next_hint":"%s","nonce":"%s"}\n' \
    "$1" "$2" "$3" "$4" "$nonce"
}

# Runs the program under review. Before the change is made there is nothing to run.
verify() {
  case $phase in
    research | design | spec)
      verdict true 1 "The document says what this phase has to say" ""
      return
      ;;
  esac
  if [ "$(sh greet.sh you 2>&1)" != 'Hello, you!' ]; then
    verdict false 0 "sh greet.sh you does not print: Hello, you!" "Greet the name that is given"
  elif ! nobody=$(sh greet.sh 2>&1) || [ "$nobody" = 'Hello, !' ]; then
    verdict false 0.4 "sh greet.sh without a name greets nobody" \
      "Without an argument, fall back to the name world"
  else
    verdict true 1 "sh greet.sh prints: $nobody" ""
  fi
}

# Takes the command and the next phase from the prompt and runs it, as a model would with its shell tool.
orchestrate() {
  if ! section Verdict | grep -q '"pass": *true'; then
    echo 'The verdict is a fail: no command.'
    return
  fi
  command=$(printf '%s\n' "$prompt" | sed -n 's/^    \(.*\) --transition PHASE .*/\1/p' | head -n 1)
  next=$(printf '%s\n' "$prompt" | sed -n "s/^- $phase -> \([a-z_]*\).*/\1/p" | head -n 1)
  set -- --transition "$next" --task "$task"
  if [ "$next" = human_intervention ]; then
    set -- "$@" --reason 'The spec is ready for approval'
  fi
  eval "$command \"\$@\""
}

unknown() {
  printf 'Cannot play the demo agent: unknown %s\n' "$1" >&2
  exit 2
}

main() {
  role=$1 task=$2 phase=$3 task_dir=$4
  prompt=$(cat)
  case $role in
    implement) implement ;;
    verify) verify ;;
    orchestrate) orchestrate ;;
    *) unknown "role $role" ;;
  esac
}

{
  main "$@"
  exit
}
