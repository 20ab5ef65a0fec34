/** What stands beside a verdict: checks, commits, hooks. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import {
  git,
  loopDir,
  poll,
  readLog,
  run,
  runProgram,
  type Scratch,
  writeFile,
  writeScript,
} from "./helpers.ts";
import {
  LOOP,
  makeLoopScratch,
  outputOf,
  readState,
  TASK,
  tick,
  worktreeOf,
} from "./runner_support.ts";
import { quoteShWord } from "../scripts/status.ts";

/** The Deno that runs the tests, as sh reads it. */
const DENO = quoteShWord(Deno.execPath());

/** The subject of the last commit on the loop's branch. */
function lastSubject(scratch: Scratch): string {
  return git(scratch, scratch.project, "log", "-1", "--format=%s", `loop/${LOOP}`);
}

/** The files of the last commit on the loop's branch. */
function filesOfBranch(scratch: Scratch): string[] {
  const names = git(scratch, scratch.project, "ls-tree", "-r", "-z", "--name-only", `loop/${LOOP}`);
  return names.split("\0").filter((name) => name !== "").sort();
}

const FILES_AT_START = [".gitignore", "README.md"];

// --- Checks ---

Deno.test("a check that fails makes the verdict a fail, whatever the verifier says", async () => {
  using scratch = makeLoopScratch({
    verify: "verdict true 0.9 'all is well'",
    config: {
      checks: [
        ["sh", "-c", "echo fine"],
        ["sh", "-c", "echo line 1; echo the test broke >&2; exit 3"],
        ["no-such-check"],
      ],
    },
  });
  const { json } = await tick(scratch);
  assertEquals([json.verdict?.pass, json.verdict?.score, json.next_phase], [
    false,
    0.9,
    "implement",
  ]);
  assertEquals(json.verdict?.reasons.slice(0, 2), [
    "check failed: sh -c 'echo line 1; echo the test broke >&2; exit 3'",
    "check failed: no-such-check",
  ]);
  // The hint of a verifier that was content is no help to the next try; what the check said is.
  assertStringIncludes(json.verdict!.next_hint!, "the test broke");
  assert(!json.verdict!.next_hint!.includes("all is well"));
  assertEquals(readState(scratch).pass_history, [false]);

  const results = JSON.parse(Deno.readTextFileSync(outputOf(scratch, "tick1-checks.json")));
  const shown = results.map((
    r: Record<string, unknown>,
  ) => [r.ok, r.result, r.exit_code, r.output]);
  assertEquals(shown.slice(0, 2), [
    [true, "ok", 0, "fine"],
    [false, "exit_nonzero", 3, "line 1\nthe test broke"],
  ]);
  assertEquals(shown[2].slice(0, 3), [false, "not_found", null]);
  assertEquals(json.checks.length, 3);
  const prompt = Deno.readTextFileSync(outputOf(scratch, "tick1-verify-prompt.md"));
  assertStringIncludes(prompt, "$ sh -c 'echo fine'\npassed\n\n$ sh -c");
  assertStringIncludes(prompt, "FAILED (exit_nonzero, exit code 3)\nline 1\nthe test broke");

  const second = await tick(scratch);
  const next = Deno.readTextFileSync(second.json.artifacts.implement_prompt!);
  assertStringIncludes(next, "the test broke");
});

Deno.test("a verifier's own fail keeps its hint beside a failed check", async () => {
  using scratch = makeLoopScratch({
    verify: "verdict false 0.1 'do it otherwise'",
    config: { checks: [["false"]] },
  });
  const { json } = await tick(scratch);
  assertEquals(json.verdict?.next_hint, "do it otherwise");
  assertEquals(json.verdict?.reasons, ["check failed: false", "as told"]);
});

Deno.test("checks run in the worktree after the work, may write nothing by status, and end in time", async () => {
  const script = `test -f work.txt && pwd && ${DENO} run -q --no-prompt -P=status ` +
    `"$AUTOMATON_HOME/scripts/status.ts" --transition code_review --task ${TASK}`;
  using scratch = makeLoopScratch({
    config: {
      checks: [["sh", "-c", script], ["sh", "-c", "sleep 1000 & sleep 1000"]],
      harness: { timeout_seconds: 3 },
    },
  });
  const { json } = await tick(scratch);
  assertEquals(json.checks.map(({ result }) => result), ["exit_nonzero", "timeout"]);
  assertStringIncludes(json.checks[0]!.output, worktreeOf(scratch));
  assertStringIncludes(json.checks[0]!.output, "may change nothing");
  assertEquals(json.next_phase, "implement");
});

Deno.test("what a check prints at most reaches the verifier as its end", async () => {
  using scratch = makeLoopScratch({
    config: { checks: [["sh", "-c", "seq 1 100000; exit 1"]] },
  });
  const { json } = await tick(scratch);
  const { output } = json.checks[0]!;
  assert(output.length < 4100, `${output.length}`);
  assertMatch(output, /^…[^]*\n99999\n100000$/);
  // So short that its end survives the cut of a hint in a prompt.
  const next = (await tick(scratch)).json.artifacts.implement_prompt!;
  assertStringIncludes(Deno.readTextFileSync(next), "\n99999\n100000");
});

// --- Commit ---

Deno.test("work that passed is committed on the loop's branch, only files in scope", async () => {
  using scratch = makeLoopScratch({
    implement:
      "mkdir -p src; echo a >src/a.txt; echo b >src/b.txt; rm README.md; echo x >other.txt",
    verify: "verdict true 0.75",
    config: { blast_radius: { file_scope: ["src", "README.md"] } },
  });
  const { json } = await tick(scratch);
  assertEquals(json.verdict?.pass, true);
  assertEquals(lastSubject(scratch), `loop(${LOOP}): ${TASK} tick 1, score 0.75`);
  assertEquals(filesOfBranch(scratch), [".gitignore", "src/a.txt", "src/b.txt"]);
  assertEquals(git(scratch, worktreeOf(scratch), "status", "--porcelain"), "?? other.txt");
  assertEquals(git(scratch, scratch.project, "status", "--porcelain"), "", "the person's checkout");
});

for (
  const [when, pass, isCommitted] of [
    ["on_pass", false, false],
    ["always", false, true],
    ["always", true, true],
    ["never", true, false],
  ] as const
) {
  Deno.test(`blast_radius.commit ${when} ${isCommitted ? "commits" : "leaves"} work that ${pass ? "passed" : "failed"}`, async () => {
    using scratch = makeLoopScratch({
      verify: `verdict ${pass} 0.5`,
      config: { blast_radius: { commit: when } },
    });
    await tick(scratch);
    const expected = isCommitted ? [...FILES_AT_START, "work.txt"] : FILES_AT_START;
    assertEquals(filesOfBranch(scratch), expected.sort());
    assert(existsSync(join(worktreeOf(scratch), "work.txt")));
  });
}

Deno.test("files with odd names are committed", async () => {
  const names = [
    "-dash",
    "*",
    "a b",
    "new\nline",
    '"quoted"',
    "back\\slash",
    ":(top)x",
    "ünï 漢字",
  ];
  using scratch = makeLoopScratch({
    implement: names.map((name) => `echo x >'./${name}'`).join("\n"),
  });
  const { json } = await tick(scratch);
  assertEquals(json.warnings, []);
  assertEquals(filesOfBranch(scratch), [...FILES_AT_START, ...names].sort());
});

Deno.test("a tick without changes makes no commit", async () => {
  using scratch = makeLoopScratch({ implement: "echo nothing to do" });
  const { json } = await tick(scratch);
  assertEquals([json.verdict?.pass, lastSubject(scratch)], [true, "start"]);
});

Deno.test("without an identity of git a commit is made in the project's name", async () => {
  using scratch = makeLoopScratch();
  writeFile(
    join(scratch.home, ".gitconfig"),
    "[user]\nuseConfigOnly = true\n[init]\ndefaultBranch = main\n",
  );
  const { json } = await tick(scratch);
  assertEquals(json.warnings, []);
  const who = git(scratch, scratch.project, "log", "-1", "--format=%an %ae %cn", `loop/${LOOP}`);
  assertEquals(who, "Automaton automaton@localhost Automaton");
});

Deno.test("signing, editors and templates of a person's git settings do not hold up a commit", async () => {
  using scratch = makeLoopScratch();
  Deno.writeTextFileSync(
    join(scratch.home, ".gitconfig"),
    "[commit]\ngpgSign = true\nverbose = true\n[gpg]\nprogram = /nonexistent\n[core]\neditor = sleep 1000\n",
    { append: true },
  );
  const { json } = await tick(scratch);
  assertEquals(json.warnings, []);
  assertMatch(lastSubject(scratch), /^loop\(night\)/);
});

Deno.test("a hook of git that refuses or hangs leaves the work uncommitted, with a warning", async () => {
  for (
    const [hook, words] of [
      ["echo the linter says no >&2; exit 1", "the linter says no"],
      ["sleep 1000 & sleep 1000", "longer than 5 s"],
    ] as const
  ) {
    using scratch = makeLoopScratch({ config: { harness: { timeout_seconds: 5 } } });
    writeScript(join(scratch.project, ".git", "hooks", "pre-commit"), `#!/bin/sh\n${hook}\n`);
    const { json } = await tick(scratch);
    assertEquals([json.verdict?.pass, json.next_phase], [true, "code_review"]);
    assertEquals(json.warnings.length, 1, json.warnings.join("\n"));
    assertStringIncludes(json.warnings[0]!, "nothing is committed");
    assertStringIncludes(json.warnings[0]!, words);
    assertEquals(lastSubject(scratch), "start");
    assert(existsSync(join(worktreeOf(scratch), "work.txt")));
  }
});

Deno.test("a hook of git may look at its commit and may change nothing by status", async () => {
  using scratch = makeLoopScratch();
  writeScript(
    join(scratch.project, ".git", "hooks", "pre-commit"),
    `#!/bin/sh\n${DENO} run -q --no-prompt -P=status "$AUTOMATON_HOME/scripts/status.ts" ` +
      `--transition research --task ${TASK} --reason x >${scratch.dir}/hook.out 2>&1\n` +
      `echo "code $?" >>${scratch.dir}/hook.out\n`,
  );
  await tick(scratch);
  const said = Deno.readTextFileSync(join(scratch.dir, "hook.out"));
  assertStringIncludes(said, "may change nothing");
  assertStringIncludes(said, "code 1");
});

// --- Hooks of a loop ---

/** A hook that notes what it is told; more of sh may follow. */
function noteHook(scratch: Scratch, more = ""): string[] {
  const script =
    'printf "%s %s %s %s\\n" "$AUTOMATON_EVENT" "$AUTOMATON_REASON" "$AUTOMATON_LOOP" ' +
    `"$AUTOMATON_ROLE" >>${scratch.dir}/notes; ${more}`;
  return ["sh", "-c", script];
}

function readNotes(scratch: Scratch): string {
  const path = join(scratch.dir, "notes");
  return existsSync(path) ? Deno.readTextFileSync(path) : "";
}

/** Changes loop.json. */
function setHooks(scratch: Scratch, hooks: Readonly<Record<string, readonly string[]>>): void {
  const path = join(loopDir(scratch, LOOP), "loop.json");
  writeFile(path, JSON.stringify({ ...JSON.parse(Deno.readTextFileSync(path)), hooks }));
}

Deno.test("on_complete runs once, when the loop is complete", async () => {
  using scratch = makeLoopScratch({ phase: "code_review" });
  setHooks(scratch, { on_complete: noteHook(scratch), on_halt: noteHook(scratch) });
  await tick(scratch);
  assertEquals(readNotes(scratch), "");
  const { json } = await tick(scratch);
  assertEquals(json.status, "complete");
  assertEquals((await tick(scratch)).json.reason, "complete");
  assertEquals(readNotes(scratch), `complete complete ${LOOP} verify\n`);
});

Deno.test("on_halt runs once for a halt, with its reason: by a verdict, the gate, failures, a person", async () => {
  const halts: [string, Parameters<typeof makeLoopScratch>[0], string][] = [
    ["no verdict", { verify: "echo no verdict" }, "verifier_failed"],
    ["iterations", { state: { iteration_count: 10 } }, "iterations_exhausted"],
    ["failures", {
      implement: "exit 1",
      config: { brakes: { max_consecutive_failures: 1 } },
    }, "human_intervention"],
  ];
  for (const [what, plan, reason] of halts) {
    using scratch = makeLoopScratch(plan);
    setHooks(scratch, { on_halt: noteHook(scratch) });
    for (let number = 1; number <= 2; number++) {
      const { json } = await tick(scratch);
      assertEquals(json.halt_reason, reason, what);
    }
    assertEquals(readNotes(scratch), `halt ${reason} ${LOOP} verify\n`, what);
  }
  using scratch = makeLoopScratch();
  setHooks(scratch, { on_halt: noteHook(scratch) });
  const halt = [`--halt-loop=${LOOP}`, "--reason=human_intervention"];
  for (let number = 1; number <= 2; number++) await runProgram(scratch, "status", halt);
  assertEquals(readNotes(scratch), `halt human_intervention ${LOOP} verify\n`);
});

Deno.test("a hook that fails or hangs is a warning, and the event stands", async () => {
  for (
    const [hook, words] of [
      [["sh", "-c", "exit 7"], "exit code 7"],
      [["no-such-hook"], "no-such-hook"],
      [["sh", "-c", "sleep 1007 & sleep 1007"], "2 s"],
    ] as const
  ) {
    using scratch = makeLoopScratch({
      phase: "bug_hunt",
      config: { harness: { timeout_seconds: 2 } },
    });
    setHooks(scratch, { on_complete: hook, on_halt: hook });
    const { json } = await tick(scratch);
    assertEquals(json.status, "complete");
    assertStringIncludes(json.warnings.join("\n"), "the on_complete hook failed");
    assertStringIncludes(json.warnings.join("\n"), words);

    using halted = makeLoopScratch({
      verify: "echo no verdict",
      config: { harness: { timeout_seconds: 2 } },
    });
    setHooks(halted, { on_complete: hook, on_halt: hook });
    assertEquals((await tick(halted)).json.halt_reason, "verifier_failed");
    const warnings = readLog(halted, LOOP).filter(({ message }) =>
      `${message}`.startsWith("the on_halt hook failed")
    );
    assertEquals(warnings.length, 1);
    assertStringIncludes(`${warnings[0]!.message}`, words);
    for (const each of [scratch, halted]) {
      await poll("end of the hook's processes", async () => await listSleepers(each) === "");
    }
  }
});

/** Processes that the hanging hook has left. */
async function listSleepers(scratch: Scratch): Promise<string> {
  const script = 'grep -lsF "HOME=$1" /proc/[0-9]*/environ | while read -r f; do ' +
    'tr "\\0" " " <"${f%environ}cmdline"; done | grep -o "sleep 100[7]"';
  return (await run(scratch, ["sh", "-c", script, "sh", scratch.home])).stdout;
}

Deno.test("a hook cannot approve what it is told of", async () => {
  using scratch = makeLoopScratch({ verify: "echo no verdict" });
  const approve = `${DENO} run -q --no-prompt -P=status "$AUTOMATON_HOME/scripts/status.ts" ` +
    `--approve --loop ${LOOP} --lock-timeout 0 >${scratch.dir}/said 2>&1`;
  setHooks(scratch, { on_halt: noteHook(scratch, approve) });
  await tick(scratch);
  assertStringIncludes(Deno.readTextFileSync(join(scratch.dir, "said")), "only a person approves");
  assertEquals(readState(scratch).status, "halted");
});
