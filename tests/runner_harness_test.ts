/** How a harness is started, fed, watched and ended, with nothing of it left behind. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import {
  isAlive,
  loopDir,
  readLog,
  ROOT,
  type Scratch,
  snapshot,
  writeFile,
  writeScript,
} from "./helpers.ts";
import {
  LOOP,
  makeLoopScratch,
  outputOf,
  readJournal,
  readState,
  startTick,
  TASK,
  tick,
  worktreeOf,
} from "./runner_support.ts";

/** The command of a harness that runs a script for Implement and passes in Verify. */
function command(script: string, ...args: readonly string[]): { command: string[] } {
  const verify = 'case "$1" in verify) echo \'{"pass":true}\'; exit;; esac; shift; ';
  return { command: ["sh", "-c", verify + script, "sh", "{role}", ...args] };
}

/** What Implement printed in the first tick. */
function readSaid(scratch: Scratch, stream = "log"): string {
  return Deno.readTextFileSync(outputOf(scratch, `tick1-implement.${stream}`));
}

/** The processes whose ids a harness has noted in the project's file "pids". */
function readPids(scratch: Scratch): number[] {
  const path = join(scratch.project, "pids");
  if (!existsSync(path)) return [];
  return Deno.readTextFileSync(path).split(/\s+/).filter((word) => word !== "").map(Number);
}

/** Notes the shell's own process. */
const NOTE = 'echo $$ >>"$PIDS"; ';

/** A loop whose harness can note the processes that it starts. */
function makeProcessScratch(script: string, harness: Record<string, unknown> = {}): Scratch {
  const scratch = makeLoopScratch();
  const path = join(loopDir(scratch, LOOP), "loop.json");
  const config = JSON.parse(Deno.readTextFileSync(path));
  const env = { PIDS: join(scratch.project, "pids") };
  writeFile(path, JSON.stringify({ ...config, harness: { ...command(script), env, ...harness } }));
  return scratch;
}

function assertAllEnded(scratch: Scratch, count: number): void {
  const pids = readPids(scratch);
  assertEquals(pids.length, count, `pids: ${pids}`);
  const alive = pids.filter(isAlive);
  for (const pid of alive) Deno.kill(pid, "SIGKILL");
  assertEquals(alive, [], "these processes have survived the tick");
}

// --- Start ---

Deno.test("argv is filled in token by token, without a shell", async () => {
  const args = [
    "{prompt}",
    "{cwd}",
    "{output}",
    "{artifact}",
    "{verdict}",
    "{current_task}",
    "{current_phase}",
    "{task_brief}",
    "{acceptance_criteria}",
    "{next_hint}",
    "{model}",
    "{loop_name}",
    "{loop_dir}",
    "{framework}",
    "{role}",
    "{tick}",
    "{task_dir}",
    "x{role}y{role}",
    "{unknown}",
    "",
    "$HOME `id` \"q\" 'q' %s \\n *",
    "--",
    "-n",
  ];
  using scratch = makeLoopScratch({
    config: {
      acceptance_criteria: ["one {role}", "two"],
      harness: command('for each; do printf "<%s>\\n" "$each"; done', ...args),
    },
    state: { last_verdict: { pass: false, score: 0, reasons: [], next_hint: "hint {cwd}" } },
  });
  await tick(scratch);
  const dir = loopDir(scratch, LOOP);
  const task = join(scratch.project, ".automaton/tasks", TASK);
  assertEquals(
    readSaid(scratch),
    [
      `<${outputOf(scratch, "tick1-implement-prompt.md")}>`,
      `<${worktreeOf(scratch)}>`,
      `<${outputOf(scratch, "tick1-implement.json")}>`,
      `<${outputOf(scratch, "tick1-implement.json")}>`,
      "<{verdict}>",
      `<${TASK}>`,
      "<implement>",
      `<# RESEARCH.md of ${TASK}\n>`,
      "<one {role}\ntwo>",
      "<hint {cwd}>",
      "<{model}>",
      `<${LOOP}>`,
      `<${dir}>`,
      `<${Deno.realPathSync(ROOT)}>`,
      "<implement>",
      "<1>",
      `<${task}>`,
      "<ximplementyimplement>",
      "<{unknown}>",
      "<>",
      "<$HOME `id` \"q\" 'q' %s \\n *>",
      "<-->",
      "<-n>",
      "",
    ].join("\n"),
  );
});

Deno.test("prompt_var, cwd_var and output_var give those tokens another spelling", async () => {
  using scratch = makeLoopScratch({
    config: {
      harness: {
        ...command('printf "%s\\n" "$@"', "@P@", "%CWD%", "<out>", "{prompt}", "{cwd}"),
        prompt_var: "@P@",
        cwd_var: "%CWD%",
        output_var: "<out>",
      },
    },
  });
  await tick(scratch);
  assertEquals(readSaid(scratch).trimEnd().split("\n"), [
    outputOf(scratch, "tick1-implement-prompt.md"),
    worktreeOf(scratch),
    outputOf(scratch, "tick1-implement.json"),
    "{prompt}",
    "{cwd}",
  ]);
});

const MODEL_AND_VERDICT = 'echo "$2"; [ "$1" != verify ] || echo \'{"pass":true}\'';

Deno.test("a role's model comes from loop.json, else from models.json", async () => {
  using scratch = makeLoopScratch({
    config: {
      roles: { verify: { model: "judge" } },
      harness: {
        command: ["sh", "-c", MODEL_AND_VERDICT, "sh", "{role}", "{model}"],
      },
    },
  });
  const models = { worker: { context_tokens: 32_000 }, judge: { context_tokens: 20_000 } };
  writeFile(
    join(scratch.project, ".automaton/models.json"),
    JSON.stringify({ default: "worker", models }),
  );
  const { json } = await tick(scratch, [], { env: { AUTOMATON_CONTEXT_TOKENS: undefined } });
  assertEquals(json.reason, null, json.message ?? "");
  assertMatch(readSaid(scratch), /^worker$/m);
  assertMatch(Deno.readTextFileSync(outputOf(scratch, "tick1-verify.log")), /^judge$/m);
});

Deno.test("stdin is closed, unless the prompt is wanted there, which comes byte for byte", async () => {
  using closed = makeLoopScratch({ config: { harness: command("cat; echo end") } });
  await tick(closed);
  assertEquals(readSaid(closed), "end\n");
  const text = 'say "hi" \\n $x `y`\n\ttab \u00e9 \ud83d\ude00 '.repeat(10_000);
  using fed = makeLoopScratch({
    config: {
      roles: { implement: { prompt: "own.md", tier: 200_000 } },
      harness: { ...command("cat"), stdin: "prompt" },
    },
  });
  writeFile(join(loopDir(fed, LOOP), "own.md"), text);
  await tick(fed, [], { env: { AUTOMATON_CONTEXT_TOKENS: "1000000" } });
  assertEquals(readSaid(fed), text);
});

Deno.test("a harness that does not read the prompt on its stdin is none the worse", async () => {
  using scratch = makeLoopScratch({
    config: {
      roles: { implement: { prompt: "own.md", tier: 200_000 } },
      harness: { ...command("exec <&-; echo read nothing"), stdin: "prompt" },
    },
  });
  writeFile(join(loopDir(scratch, LOOP), "own.md"), "x".repeat(700_000));
  const { json } = await tick(scratch, [], { env: { AUTOMATON_CONTEXT_TOKENS: "1000000" } });
  assertEquals(json.reason, null, json.message ?? "");
});

Deno.test("{prompt_content} is the prompt as one argument", async () => {
  using scratch = makeLoopScratch({
    config: { harness: command('printf "%s" "$1"', "{prompt_content}") },
  });
  await tick(scratch);
  assertEquals(
    readSaid(scratch),
    Deno.readTextFileSync(outputOf(scratch, "tick1-implement-prompt.md")),
  );
});

Deno.test("the environment is the person's, with what loop.json and the tick say", async () => {
  using scratch = makeLoopScratch({
    config: {
      harness: {
        ...command("env -0 | tr '\\n\\0' ' \\n' | sort; echo PWD=$(pwd)"),
        env: { ADDED: "a b", HOME: "/elsewhere", AUTOMATON_ROLE: "verify", PWD: "/" },
        unset_env: ["SECRET", "MISSING"],
      },
    },
  });
  await tick(scratch, [], { env: { SECRET: "x", KEPT: "y", GIT_DIR: "/nowhere" } });
  const lines = readSaid(scratch).split("\n");
  const wanted = [
    "ADDED=a b",
    "HOME=/elsewhere",
    "KEPT=y",
    "AUTOMATON_ROLE=implement",
    `AUTOMATON_LOOP=${LOOP}`,
    `AUTOMATON_TASK=${TASK}`,
    `AUTOMATON_PROJECT=${scratch.project}`,
    `PWD=${worktreeOf(scratch)}`,
  ];
  for (const line of wanted) assert(lines.includes(line), `${line} in\n${lines.join("\n")}`);
  assert(lines.some((line) => /^AUTOMATON_RUN_ID=[0-9a-f-]{36}$/.test(line)));
  assert(
    !lines.some((line) => /^(SECRET|GIT_DIR|AUTOMATON_NO_LOOP_LOCK|AUTOMATON_OP_FILE)=/.test(line)),
  );
});

Deno.test("a command is found on the PATH that the harness gets, and relative to its folder", async () => {
  using scratch = makeLoopScratch({
    config: { harness: { command: ["my-agent"], env: { PATH: "/nowhere" } } },
  });
  const bin = join(scratch.dir, "agents");
  writeScript(
    join(bin, "my-agent"),
    "#!/bin/sh\n[ $AUTOMATON_ROLE != verify ] || echo '{\"pass\":true}'\n",
  );
  const missing = await tick(scratch);
  assertMatch(missing.json.message ?? "", /not_found: .*"my-agent".*PATH is \/nowhere/);
  const path = join(loopDir(scratch, LOOP), "loop.json");
  writeFile(path, Deno.readTextFileSync(path).replace("/nowhere", `${bin}:/usr/bin:/bin`));
  assertEquals((await tick(scratch)).json.reason, null);
});

Deno.test("each way in which a harness fails to start has its own name", async (t) => {
  using scratch = makeLoopScratch({ config: { brakes: { max_consecutive_failures: 99 } } });
  const file = (name: string, text: string, mode: number) => {
    writeFile(join(scratch.dir, name), text);
    Deno.chmodSync(join(scratch.dir, name), mode);
    return join(scratch.dir, name);
  };
  const cases: readonly (readonly [string, string[], RegExp])[] = [
    ["not_found", ["/nowhere/agent"], /"\/nowhere\/agent": not found/],
    ["not_found", [file("bad-interpreter", "#!/nowhere/sh\n", 0o755)], /interpreter/],
    ["not_executable", [file("plain", "#!/bin/sh\n", 0o644)], /not executable/],
    ["not_executable", [scratch.dir], /not executable/],
    ["argument_list_too_long", ["echo", "x".repeat(131_072)], /131072 characters.*\{prompt\}/],
    ["exit_nonzero", ["false"], /exit code 1/],
    ["killed", ["sh", "-c", "kill -9 $$"], /SIGKILL/],
  ];
  const path = join(loopDir(scratch, LOOP), "loop.json");
  const config = JSON.parse(Deno.readTextFileSync(path));
  for (const [result, argv, message] of cases) {
    await t.step(`${result}: ${argv[0]!.slice(0, 40)}`, async () => {
      writeFile(path, JSON.stringify({ ...config, harness: { command: argv } }));
      const { code, json } = await tick(scratch);
      assertEquals([code, json.reason], [0, "harness_failed"]);
      assert(json.message?.startsWith(`${result}: `), json.message ?? "");
      assertMatch(json.message ?? "", message);
    });
  }
  assertEquals(readState(scratch).iteration_count, 0);
});

Deno.test("Implement that fails with changes left goes to Verify, marked", async (t) => {
  for (
    const [name, script, mark] of [
      ["exit code", "echo x >>work.txt; exit 7", "exit code 7"],
      ["killed", "echo x >>work.txt; kill -9 $$", "SIGKILL"],
      ["a commit", "git commit -q --allow-empty -m x; exit 1", "exit code 1"],
    ] as const
  ) {
    await t.step(name, async () => {
      using scratch = makeLoopScratch({ implement: script });
      const { json } = await tick(scratch);
      assertEquals([json.reason, json.verdict?.pass], [null, true]);
      assertStringIncludes(json.warnings.join(), mark);
      assertStringIncludes(
        Deno.readTextFileSync(outputOf(scratch, "tick1-verify-prompt.md")),
        mark,
      );
      assertEquals(readState(scratch).consecutive_failures, 0);
    });
  }
});

Deno.test("Verify that exits non-zero with a verdict counts, one that dies without does not", async () => {
  using counted = makeLoopScratch({ verify: "verdict true 1; exit 1" });
  assertEquals((await tick(counted)).json.verdict?.pass, true);
  using died = makeLoopScratch({ verify: "echo thinking; exit 1" });
  const { json } = await tick(died);
  assertEquals([json.reason, json.verdict, json.status], ["harness_failed", null, "running"]);
  using killed = makeLoopScratch({ verify: "verdict true 1; kill -9 $$" });
  assertEquals((await tick(killed)).json.reason, "harness_failed");
});

// --- Output ---

Deno.test("hundred megabytes of output take little memory, and the verdict at the end is found", async () => {
  using scratch = makeLoopScratch({
    implement: "head -c 120000000 /dev/zero",
    verify: "head -c 120000000 /dev/zero | tr '\\0' '{'; echo; verdict true 0.75",
  });
  const child = startTick(scratch, ["--json"], {
    prefix: ["sh", "-c", PEAK_MEMORY, "sh", join(scratch.dir, "peak")],
  });
  const output = await child.output();
  const json = JSON.parse(new TextDecoder().decode(output.stdout).trimEnd().split("\n").at(-1)!);
  assertEquals([json.reason, json.verdict?.score], [null, 0.75], json.message);
  for (const role of ["implement", "verify"]) {
    const path = outputOf(scratch, `tick1-${role}.log`);
    const { size } = Deno.statSync(path);
    assert(size > 64 * 1024 * 1024 && size < 65 * 1024 * 1024, `${size}`);
  }
  const log = Deno.readFileSync(outputOf(scratch, "tick1-verify.log"));
  assertMatch(
    new TextDecoder().decode(log.subarray(-6000)),
    /bytes more, of which these are the last\][^]*"pass":true/,
  );
  const peakKib = Number(Deno.readTextFileSync(join(scratch.dir, "peak")));
  assert(peakKib > 10_000 && peakKib < 300_000, `${peakKib} KiB`);
});

/** Runs a command and writes the most memory that it has held to a file, in KiB. */
const PEAK_MEMORY = 'out=$1; shift; "$@" & pid=$!; peak=0; ' +
  'while line=$(sed -n "s/^VmHWM:[^0-9]*\\([0-9]*\\).*/\\1/p" /proc/$pid/status 2>/dev/null) && [ -n "$line" ]; do ' +
  'peak=$line; sleep 0.1; done; echo "$peak" >"$out"; wait $pid';

Deno.test("bytes that are no text do not stop a tick, and the log keeps them", async () => {
  using scratch = makeLoopScratch({
    implement: "printf '\\377\\376\\000\\033[2J\\200'; echo x >>work.txt",
    verify: "printf '\\377\\000{\\n'; verdict true 0.5; printf '\\n\\355\\240\\200'",
  });
  const { json } = await tick(scratch);
  assertEquals(json.verdict?.score, 0.5);
  const bytes = Deno.readFileSync(outputOf(scratch, "tick1-implement.log"));
  assertEquals([...bytes], [0xff, 0xfe, 0, 0x1b, 0x5b, 0x32, 0x4a, 0x80]);
});

Deno.test("both streams are kept apart", async () => {
  using scratch = makeLoopScratch({ implement: "echo out; echo err >&2; echo x >>work.txt" });
  await tick(scratch);
  assertEquals([readSaid(scratch), readSaid(scratch, "err.log")], ["out\n", "err\n"]);
});

Deno.test("an artifact that is no regular file is passed over", async (t) => {
  for (const make of ["mkfifo", "mkdir", "ln -s /dev/zero"]) {
    await t.step(make, async () => {
      using scratch = makeLoopScratch({
        config: { harness: command(`${make} "$1"; echo what I did`, "{output}") },
      });
      const { json } = await tick(scratch);
      assertEquals(json.reason, null, json.message ?? "");
      assertStringIncludes(
        Deno.readTextFileSync(outputOf(scratch, "tick1-implement.json")),
        "what I did",
      );
    });
  }
});

Deno.test("a huge artifact is cut where a prompt or a document takes it", async () => {
  using scratch = makeLoopScratch({
    phase: "research",
    config: { harness: command('head -c 50000000 /dev/zero | tr "\\0" x >"$1"', "{output}") },
  });
  assertEquals((await tick(scratch)).json.next_phase, "design");
  const document = join(scratch.project, ".automaton/tasks", TASK, "RESEARCH.md");
  assert(Deno.statSync(document).size < 5_000_000);
});

// --- Ends ---

Deno.test("a harness at its timeout is ended, and so is one that is silent for too long", async (t) => {
  for (
    const [harness, result] of [
      [{ timeout_seconds: 0.5 }, "timeout"],
      [{ timeout_seconds: 50, idle_timeout_seconds: 0.5 }, "idle_timeout"],
    ] as const
  ) {
    await t.step(result, async () => {
      using scratch = makeProcessScratch(`${NOTE} echo started; sleep 300`, harness);
      const { json } = await tick(scratch);
      assertEquals(json.reason, "harness_timeout");
      assertStringIncludes(json.message ?? "", `${result}: `);
      assertStringIncludes(readSaid(scratch), "started");
      assertAllEnded(scratch, 1);
    });
  }
});

Deno.test("a harness that prints all the time is not silent", async () => {
  using scratch = makeProcessScratch(
    "for n in 1 2 3 4 5 6 7 8; do echo $n; sleep 0.25; done; echo x >>work.txt",
    { idle_timeout_seconds: 1.5 },
  );
  assertEquals((await tick(scratch)).json.reason, null);
});

Deno.test("no timeout is kept where it is 0", async () => {
  using scratch = makeProcessScratch("sleep 0.5; echo x >>work.txt", { timeout_seconds: 0 });
  assertEquals((await tick(scratch)).json.reason, null);
});

Deno.test("a harness that ignores TERM and a grandchild that holds its output end within 10 s more", async () => {
  const stubborn = 'trap "" TERM INT HUP; while :; do sleep 1; done';
  using scratch = makeProcessScratch(
    `sh -c '${NOTE} ${stubborn}' & ${NOTE} echo begun; ${stubborn}`,
    { timeout_seconds: 1 },
  );
  const { json } = await tick(scratch);
  assertEquals(json.reason, "harness_timeout");
  const tookMs = json.durations_ms.implement!;
  assert(tookMs >= 1000 && tookMs <= 11_000, `${tookMs} ms`);
  assertStringIncludes(readSaid(scratch), "begun");
  assertAllEnded(scratch, 2);
});

Deno.test("a harness may clean up after TERM", async () => {
  using scratch = makeProcessScratch(
    `trap 'echo cleaned; kill $child; exit' TERM; ${NOTE} sleep 300 & child=$!; wait`,
    { timeout_seconds: 0.5 },
  );
  assertEquals((await tick(scratch)).json.reason, "harness_timeout");
  assertStringIncludes(readSaid(scratch), "cleaned");
  assertAllEnded(scratch, 1);
});

/** How a process can leave the harness that started it; each notes one process. */
const LEAVERS: Readonly<Record<string, string>> = {
  "in the background": `sh -c '${NOTE} sleep 300' &`,
  "in the background, holding no pipe": `sh -c '${NOTE} sleep 300' >/dev/null 2>&1 &`,
  "without HUP": `nohup sh -c '${NOTE} sleep 300' >/dev/null 2>&1 &`,
  "in its own session": `setsid sh -c '${NOTE} sleep 300' &`,
  "forked twice": `sh -c "sh -c '${NOTE} sleep 300' &"`,
  "forked twice in its own session": `setsid -f sh -c "sh -c '${NOTE} sleep 300' &"`,
  "without an environment": `env -i PIDS="$PIDS" sh -c '${NOTE} sleep 300' &`,
  "forked twice without an environment": `env -i PIDS="$PIDS" sh -c "sh -c '${NOTE} sleep 300' &"`,
  "as a daemon without any tie":
    `env -i PIDS="$PIDS" setsid -f sh -c "sh -c '${NOTE} sleep 300' &" >/dev/null 2>&1`,
  "that ignores TERM": `setsid sh -c 'trap "" TERM; ${NOTE} while :; do sleep 1; done' &`,
};

const WAIT = (count: number) =>
  `until [ "$(wc -l <"$PIDS" 2>/dev/null)" = ${count} ]; do sleep 0.02; done;`;

Deno.test("what a harness leaves behind is ended after a normal exit", async () => {
  const leavers = Object.values(LEAVERS);
  const script = leavers.join("\n");
  using scratch = makeProcessScratch(`${script}\n${WAIT(leavers.length)} echo x >>work.txt`);
  const { json } = await tick(scratch);
  assertEquals(json.reason, null, json.message ?? "");
  assertMatch(json.warnings.join(), /the implement harness left \d+ process\(es\)/);
  assertAllEnded(scratch, leavers.length);
});

Deno.test("what a harness has started is ended with it at the timeout", async () => {
  const leavers = Object.values(LEAVERS);
  const script = leavers.join("\n");
  using scratch = makeProcessScratch(`${script}\n${WAIT(leavers.length)} sleep 300`, {
    timeout_seconds: 2,
  });
  assertEquals((await tick(scratch)).json.reason, "harness_timeout");
  assertAllEnded(scratch, leavers.length);
});

Deno.test("processes of others are left alone", async () => {
  using scratch = makeProcessScratch(`${NOTE} echo x >>work.txt`);
  const other = new Deno.Command("sh", {
    args: ["-c", "exec sleep 300"],
    env: { AUTOMATON_RUN_ID: "another-run" },
    stdin: "null",
    stdout: "null",
  }).spawn();
  try {
    await tick(scratch);
    assert(isAlive(other.pid));
  } finally {
    other.kill("SIGKILL");
    await other.status;
  }
});

Deno.test("a harness that starts new processes while it is being ended does not get away", async () => {
  const script =
    `trap 'sh -c "${
      NOTE.replaceAll("$", "\\$").replaceAll('"', '\\"')
    } sleep 300" &' TERM; ${NOTE} ` +
    "while :; do sleep 0.1; done";
  using scratch = makeProcessScratch(script, { timeout_seconds: 0.5 });
  assertEquals((await tick(scratch)).json.reason, "harness_timeout");
  const pids = readPids(scratch);
  assert(pids.length >= 2, "it started none");
  assertEquals(pids.filter(isAlive), []);
});

Deno.test("a harness sees who holds the loop in the lock file, and the note is gone afterwards", async () => {
  using scratch = makeLoopScratch({
    implement: 'cat "$AUTOMATON_PROJECT/.automaton/loops/night/.state.lock"',
  });
  await tick(scratch);
  const note = JSON.parse(readSaid(scratch));
  assertEquals([note.loop, typeof note.pid, typeof note.run_id], [LOOP, "number", "string"]);
  const after = JSON.parse(Deno.readTextFileSync(join(loopDir(scratch, LOOP), ".state.lock")));
  assertEquals([after.run_id, after.harness_pgid], [null, null]);
});

Deno.test("a harness whose worktree is taken away while it works halts or fails, never passes", async () => {
  using scratch = makeLoopScratch({
    implement: 'cd /; rm -rf "$PWD_OF_LOOP"; true',
    verify: "verdict true 1",
  });
  const path = join(loopDir(scratch, LOOP), "loop.json");
  const config = JSON.parse(Deno.readTextFileSync(path));
  config.harness.env.PWD_OF_LOOP = worktreeOf(scratch);
  writeFile(path, JSON.stringify(config));
  const before = snapshot(scratch.project, [".automaton", ".git"]);
  const { code, json } = await tick(scratch);
  assertEquals(code, 0);
  assert(json.verdict?.pass !== true, JSON.stringify(json));
  assertEquals(readState(scratch).iteration_count, 0);
  assertEquals(snapshot(scratch.project, [".automaton", ".git"]), before);
  assertEquals(readJournal(scratch), ["implement implement"]);
});

Deno.test("a tick without trouble logs no warning", async () => {
  using scratch = makeLoopScratch();
  await tick(scratch);
  const log = readLog(scratch, LOOP);
  assertEquals([log.length > 0, log.filter(({ level }) => level !== "INFO")], [true, []]);
});
