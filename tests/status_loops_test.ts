/** status: making, steering, listing and removing loops, and the lock that ticks hold. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import {
  finish,
  git,
  holdLock,
  loopDir,
  makeRepository,
  makeScratch,
  poll,
  readJson,
  readLog,
  ROOT,
  type Scratch,
  snapshot,
  startProgram,
  taskDir,
  writeFile,
  writeLoop,
  writeScript,
  writeTask,
} from "./helpers.ts";
import { accept, becomeNobody, daysAgo, type Json, refuse, status } from "./status_support.ts";

/** What a tick that runs here has in its lock file. */
const TICK = { pid: Deno.pid, host: Deno.hostname() };

function state(scratch: Scratch, name = "night"): Json {
  return readJson(join(loopDir(scratch, name), ".state.loop"));
}

/** A framework with one template that brings a script of its own. */
function makeFramework(scratch: Scratch, loopJson: string): Record<string, string> {
  const framework = join(scratch.dir, "framework");
  const template = join(framework, "templates/loops/mine");
  writeFile(join(template, "loop.json"), loopJson);
  writeFile(join(template, "prompts/own.md"), "do it\n");
  writeScript(join(template, "agent.sh"), "#!/bin/sh\n");
  return { AUTOMATON_HOME: framework };
}

/** Gives the loop "night" a worktree as a tick makes it; returns where. */
function addWorktree(scratch: Scratch): string {
  const worktree = join(loopDir(scratch, "night"), "worktree");
  git(scratch, scratch.project, "worktree", "add", "--quiet", worktree, "-B", "loop/night");
  writeLoop(scratch, "night", {}, { worktree_path: worktree, worktree_branch: "loop/night" });
  return worktree;
}

Deno.test("a loop is made from a template, with the files that come with it", async () => {
  using scratch = makeScratch();
  const env = makeFramework(
    scratch,
    `{ // a comment
      "$schema": "../loop.schema.json", "name": "mine",
      "work_source": {"kind": "single", "project": "~/x"},
      "acceptance_criteria": ["It works", "It is fast"],
    }`,
  );
  writeTask(scratch, "one");
  const made = await accept(scratch, ["--create-loop=night", "--from-template=mine"], { env });
  const dir = loopDir(scratch, "night");
  const { ok, loop, template, task } = made;
  assertEquals([ok, loop, template, task, made.dir], [true, "night", "mine", null, dir]);
  assertEquals(readJson(join(dir, "loop.json")), {
    $schema: join(env.AUTOMATON_HOME!, "templates/loops/loop.schema.json"),
    name: "night",
    work_source: { kind: "single", project: "~/x" },
    acceptance_criteria: ["It works", "It is fast"],
  });
  assertEquals(Deno.readTextFileSync(join(dir, "prompts/own.md")), "do it\n");
  assertEquals(Deno.statSync(join(dir, "agent.sh")).mode! & 0o111, 0o111);
  assertEquals(state(scratch), {
    schema_version: 1,
    name: "night",
    status: "running",
    halt_reason: null,
    iteration_count: 0,
    resumed_count: 0,
    last_tick_at: "1970-01-01T00:00:00Z",
    last_verdict: null,
    score_history: [],
    current_task: null,
    worktree_branch: null,
    worktree_path: null,
  });
  assertEquals(readLog(scratch, "night").map(({ event }) => event), ["CREATED"]);
});

Deno.test("the templates of this edition make loops that pass the gate", async (t) => {
  using scratch = makeScratch();
  for (const { name, isDirectory } of Deno.readDirSync(join(ROOT, "templates/loops"))) {
    if (!isDirectory) continue;
    await t.step(name, async () => {
      const { stderr } = await status(scratch, [
        `--create-loop=${name}`,
        `--from-template=${name}`,
      ]);
      assertEquals(stderr, "");
      assertEquals((await accept(scratch, [`--check-gate=${name}`])).ok, true);
    });
  }
});

Deno.test("ci-triage says what its work is and when it is done", () => {
  const { work_source, acceptance_criteria } = readJson(
    join(ROOT, "templates/loops/ci-triage/loop.json"),
  );
  assertEquals(work_source, { kind: "single" });
  assert((acceptance_criteria as string[]).length > 0);
});

Deno.test("a loop may get a task at once, and no worktree", async () => {
  using scratch = makeScratch();
  writeTask(scratch, "one");
  const args = ["--from-template=demo", "--no-worktree", "--task=one"];
  await accept(scratch, ["--create-loop=night", ...args]);
  assertEquals(state(scratch).current_task, "one");
  assertEquals(readJson(join(taskDir(scratch, "one"), ".state")).loop, "night");
  const { blast_radius } = readJson(join(loopDir(scratch, "night"), "loop.json"));
  assertEquals(blast_radius, { worktree: false, file_scope: ["greet.sh"] });
});

Deno.test("a loop that cannot be made leaves nothing behind", async (t) => {
  using scratch = makeScratch();
  const env = makeFramework(scratch, '{"brakes": {"max_iterations": 0}}');
  writeTask(scratch, "taken", "implement", { claimed_by: "me" });
  const make = (...args: string[]) => ["--create-loop=night", ...args];
  const before = snapshot(scratch.project);
  await t.step(
    "no such template",
    () =>
      refuse(
        scratch,
        make("--from-template=ci-triag"),
        /there is none in .* hint: .*ci-triage, demo/,
      ),
  );
  await t.step(
    "a template that cannot be used",
    () =>
      refuse(scratch, make("--from-template=mine"), /field brakes.max_iterations: found 0/, {
        env,
      }),
  );
  await t.step(
    "no such task",
    () => refuse(scratch, make("--from-template=demo", "--task=gone"), /Cannot open task "gone"/),
  );
  await t.step(
    "a task that somebody has",
    () => refuse(scratch, make("--from-template=demo", "--task=taken"), /me has it/),
  );
  assertEquals(snapshot(scratch.project), before);
  await t.step("a loop that is there already", async () => {
    const dir = writeLoop(scratch, "night");
    const loop = snapshot(dir);
    await refuse(scratch, make("--from-template=demo"), /exists hint: status --remove-loop night/);
    assertEquals(snapshot(dir, [".state.lock"]), loop);
  });
});

Deno.test("of several that make one loop exactly one does", async () => {
  using scratch = makeScratch();
  const args = ["--create-loop=night", "--from-template=ci-triage"];
  const results = await Promise.all(Array.from({ length: 6 }, () => status(scratch, args)));
  assertEquals(results.map(({ code }) => code).sort(), [0, 1, 1, 1, 1, 1]);
  assertEquals(readLog(scratch, "night").length, 1);
});

Deno.test("a paused loop does not pass the gate until it is resumed", async () => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night");
  assertEquals((await accept(scratch, ["--pause-loop=night"])).status, "paused");
  assertEquals((await accept(scratch, ["--pause-loop=night"])).status, "paused");
  assertEquals(state(scratch).status, "paused");
  const { ok, reason } = await accept(scratch, ["--check-gate=night"]);
  assertEquals([ok, reason], [false, "paused"]);
  assertEquals((await accept(scratch, ["--can-continue=night"])).state, "PAUSED");
  assertEquals((await accept(scratch, ["--resume-loop=night"])).status, "running");
  assertEquals((await accept(scratch, ["--resume-loop=night"])).status, "running");
  assertEquals((await accept(scratch, ["--check-gate=night"])).ok, true);
  assertEquals(readLog(scratch, "night").map(({ event }) => event), ["PAUSED", "RESUMED"]);
  assert(!existsSync(join(dir, "pause.request")));
});

Deno.test("a pause never waits: a tick in progress is asked to stop", async (t) => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night");
  const request = join(dir, "pause.request");
  {
    using _tick = holdLock(join(dir, ".state.lock"), TICK);
    for (const now of [false, true]) {
      await t.step(now ? "with --now" : "without --now", async () => {
        const args = ["--pause-loop=night", ...now ? ["--now"] : []];
        assertEquals((await accept(scratch, args)).status, "pausing");
        const { at, by, now: isNow } = readJson(request);
        assert(!Number.isNaN(Date.parse(`${at}`)));
        assertEquals([by, isNow, state(scratch).status], ["person", now, "running"]);
      });
    }
    await t.step("the loop counts as paused already", async () => {
      const { loops } = await accept(scratch, ["--loop-list"]);
      assertEquals((loops as Json[])[0]!.status, "paused");
      const { stdout, stderr } = await status(scratch, ["--can-continue=night"]);
      assertEquals([stdout, stderr], ["PAUSED\n", "hint: status --resume-loop night\n"]);
    });
    await t.step("the tick's own gate check pauses it", async () => {
      const env = { AUTOMATON_NO_LOOP_LOCK: "1" };
      const { ok, reason } = await accept(scratch, ["--check-gate=night"], { env });
      assertEquals([ok, reason, state(scratch).status], [false, "paused", "paused"]);
      assert(!existsSync(request));
      assertEquals(readLog(scratch, "night").map(({ event }) => event), ["PAUSED"]);
    });
  }
  await t.step("a request that is taken back pauses nothing", async () => {
    await accept(scratch, ["--resume-loop=night"]);
    {
      using _tick = holdLock(join(dir, ".state.lock"), TICK);
      await accept(scratch, ["--pause-loop=night"]);
    }
    await accept(scratch, ["--resume-loop=night"]);
    assertEquals((await accept(scratch, ["--check-gate=night"])).ok, true);
  });
});

Deno.test("only a halt is approved, only a pause is resumed, only what ticks is paused", async (t) => {
  using scratch = makeScratch();
  const states: readonly (readonly [string, Json])[] = [
    ["running", {}],
    ["paused", {}],
    ["halted", { halt_reason: "drift_detected" }],
    ["complete", {}],
  ];
  const commands: readonly (readonly [args: readonly string[], refused: Record<string, RegExp>])[] =
    [
      [["--approve", "--loop=night"], {
        running: /it is running now hint/,
        paused: /it is paused now hint: status --resume-loop night$/,
        complete: /it is complete now hint/,
      }],
      [["--resume-loop=night"], {
        halted: /it is halted \(drift_detected\), not paused hint: .*--approve --loop night/,
        complete: /it is complete, not paused/,
      }],
      [["--pause-loop=night"], {
        halted: /it is halted \(drift_detected\), so it does not tick/,
        complete: /it is complete, so it does not tick/,
      }],
      [["--halt-loop=night", "--reason=human_intervention"], {
        complete: /it is complete, so it does not tick/,
      }],
    ];
  for (const [args, refused] of commands) {
    for (const [word, fields] of states) {
      await t.step(`${args[0]} a loop that is ${word}`, async () => {
        const dir = writeLoop(scratch, "night", {}, { status: word, ...fields });
        const before = state(scratch);
        if (refused[word] === undefined) return void await accept(scratch, args);
        await refuse(scratch, args, refused[word]);
        assertEquals(state(scratch), before);
        assert(!existsSync(join(dir, "pause.request")));
      });
    }
  }
});

Deno.test("an approval clears what the halt was about, and the counters go on", async () => {
  using scratch = makeScratch();
  writeLoop(scratch, "night", {}, {
    status: "halted",
    halt_reason: "verifier_failed",
    iteration_count: 9,
    iteration_base: 2,
    resumed_count: 1,
    last_verdict: { pass: false, score: 0.4, reasons: [], next_hint: "try harder" },
    score_history: [0.4, 0.4, 0.4],
    pass_history: [false, false, false],
    consecutive_failures: 2,
    not_before: "2999-01-01T00:00:00Z",
    current_task: null,
    last_slot: "2026-01-01T00:00:00Z",
  });
  writeFile(join(loopDir(scratch, "night"), "pause.request"), "{}");
  const before = state(scratch);
  const { cleared, resumed_count } = await accept(scratch, ["--approve", "--loop=night"]);
  assertEquals([cleared, resumed_count], ["verifier_failed", 2]);
  assertEquals(state(scratch), {
    ...before,
    status: "running",
    halt_reason: null,
    resumed_count: 2,
    last_verdict: null,
    score_history: [],
    pass_history: [],
    consecutive_failures: 0,
    not_before: null,
    iteration_base: 9,
  });
  const { event, by, cleared: logged } = readLog(scratch, "night").at(-1)!;
  assertEquals([event, by, logged], ["APPROVED", "person", "verifier_failed"]);
  assertEquals((await accept(scratch, ["--check-gate=night"])).ok, true);
});

Deno.test("a halt by hand keeps the reason of a halt that was there before", async () => {
  using scratch = makeScratch();
  writeLoop(scratch, "night");
  const halt = (reason: string) => [`--halt-loop=night`, `--reason=${reason}`, "--detail=for fun"];
  assertEquals((await accept(scratch, halt("budget_exhausted"))).halt_reason, "budget_exhausted");
  assertEquals((await accept(scratch, halt("drift_detected"))).halt_reason, "budget_exhausted");
  const [{ event, halt_reason, detail }, ...more] = readLog(scratch, "night") as [Json];
  assertEquals([event, halt_reason, detail], ["HALTED", "budget_exhausted", "for fun"]);
  assertEquals(more, []);
  const words = await accept(scratch, ["--can-continue=night"]);
  assertEquals([words.state, words.halt_reason], ["HALTED", "budget_exhausted"]);
});

/** Commands that take the loop's lock. */
const LOCKING: readonly (readonly string[])[] = [
  ["--check-gate=night"],
  ["--resume-loop=night"],
  ["--approve", "--loop=night"],
  ["--halt-loop=night", "--reason=human_intervention"],
  ["--claim-loop-task=night", "--task=one"],
  ["--remove-loop=night"],
];

Deno.test("a command that finds the lock held says which tick holds it and since when", async (t) => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night");
  writeTask(scratch, "one");
  const note = {
    pid: Deno.pid,
    host: Deno.hostname(),
    loop: "night",
    started_at: "2026-11-30T08:15:00.000Z",
    run_id: null,
    harness_pgid: null,
    harness_started: null,
  };
  using _tick = holdLock(join(dir, ".state.lock"), note);
  const before = snapshot(scratch.project);
  for (const args of LOCKING) {
    await t.step(args[0]!, () =>
      refuse(
        scratch,
        [...args, "--lock-timeout=0"],
        new RegExp(
          `Cannot lock loop "night": a tick \\(process ${Deno.pid} on ${Deno.hostname()}\\) holds it ` +
            "since 2026-11-30T08:15:00.000Z hint: .*--pause-loop night --now",
        ),
      ));
  }
  assertEquals(snapshot(scratch.project), before);
  await t.step("the tick itself is let through", async () => {
    const env = { AUTOMATON_NO_LOOP_LOCK: "1" };
    assertEquals((await accept(scratch, ["--check-gate=night"], { env })).ok, true);
    assertEquals(readJson(join(dir, ".state.lock")), note, "its note is left alone");
  });
  await t.step("a tick elsewhere is believed", async () => {
    Deno.writeTextFileSync(
      join(dir, ".state.lock"),
      JSON.stringify({ ...note, pid: 1, host: "far" }),
    );
    const args = ["--resume-loop=night", "--lock-timeout=0"];
    await refuse(scratch, args, /a tick \(process 1 on far\) holds it/);
  });
});

Deno.test("a note of a tick that is over is not taken for the holder", async (t) => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night");
  const past = startProgram(scratch, "status", ["--version"]);
  await finish(past);
  const note = { pid: past.pid, host: Deno.hostname(), started_at: daysAgo(1) };
  for (const [name, each] of [["a past one", note], ["none", {}]] as const) {
    await t.step(name, async () => {
      using _lock = holdLock(join(dir, ".state.lock"), each);
      const args = ["--resume-loop=night", "--lock-timeout=0"];
      const words = /Cannot lock loop "night": another command holds it hint: try again/;
      await refuse(scratch, args, words);
    });
  }
});

Deno.test("a command waits for the lock and goes on when it is free", async () => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night", {}, { status: "paused" });
  const lock = holdLock(join(dir, ".state.lock"));
  const child = startProgram(scratch, "status", ["--resume-loop=night", "--lock-timeout=60"]);
  const ended = finish(child);
  // A command that was started later and waits for nothing is refused: the first one is waiting by now.
  await refuse(scratch, ["--resume-loop=night", "--lock-timeout=0"], /another command holds it/);
  assertEquals(state(scratch).status, "paused");
  lock[Symbol.dispose]();
  assertEquals((await ended).code, 0);
  assertEquals(state(scratch).status, "running");
});

Deno.test("a pause waits for another command and then takes effect", async () => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night");
  const lock = holdLock(join(dir, ".state.lock"));
  const child = startProgram(scratch, "status", ["--pause-loop=night", "--json"]);
  const ended = finish(child);
  await poll("request", () => existsSync(join(dir, "pause.request")));
  // A command that was started later and waits for nothing is refused: the pause is waiting by now.
  await refuse(scratch, ["--resume-loop=night", "--lock-timeout=0"], /another command holds it/);
  lock[Symbol.dispose]();
  const { code, stdout } = await ended;
  assertEquals([code, JSON.parse(stdout).status], [0, "paused"]);
  assertEquals(state(scratch).status, "paused");
  assert(!existsSync(join(dir, "pause.request")));
});

Deno.test("a loop that is removed leaves its logs and outputs, and can be made again", async (t) => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night", {}, { iteration_count: 3 });
  writeFile(join(dir, ".state.log"), '{"event":"TICK"}\n');
  writeFile(join(dir, ".state.log.1"), '{"event":"OLD"}\n');
  writeFile(join(dir, "outputs/tick1-verify.log"), "x");
  writeFile(join(dir, "cost.json"), "{}");
  writeTask(scratch, "one", "implement", { loop: "night" });
  await t.step("it is gone", async () => {
    assertEquals((await accept(scratch, ["--remove-loop=night"])).kept, dir);
    const left = Object.keys(snapshot(dir)).sort();
    const logs = [".state.log", ".state.log.1"];
    assertEquals(left, [".state.lock", ...logs, "outputs/tick1-verify.log"].sort());
    assertEquals((await accept(scratch, ["--loop-list"])).loops, []);
    await refuse(scratch, ["--check-gate=night"], /there is none/);
    await refuse(scratch, ["--remove-loop=night"], /there is none/);
    await refuse(scratch, ["--remove-loop=never", "--purge"], /there is none/);
  });
  await t.step("its task is free", () => {
    assertEquals(readJson(join(taskDir(scratch, "one"), ".state")).loop, null);
  });
  await t.step("it is made again, and its log goes on", async () => {
    await accept(scratch, ["--create-loop=night", "--from-template=ci-triage"]);
    assertEquals(readLog(scratch, "night").map(({ event }) => event), ["TICK", "CREATED"]);
    assertEquals(state(scratch).iteration_count, 0);
  });
  await t.step("with --purge nothing is left", async () => {
    assertEquals((await accept(scratch, ["--remove-loop=night", "--purge"])).kept, null);
    assert(!existsSync(dir));
  });
  await t.step("with --purge what a removal has kept is removed too", async () => {
    await accept(scratch, ["--create-loop=night", "--from-template=ci-triage"]);
    await accept(scratch, ["--remove-loop=night"]);
    assert(existsSync(join(dir, ".state.log")));
    await accept(scratch, ["--remove-loop=night", "--purge"]);
    assert(!existsSync(dir));
  });
});

Deno.test("a removal that was cut short can be run again", async () => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night");
  const stubborn = join(dir, "zzz");
  writeFile(join(stubborn, "file"), "x");
  const prefix = becomeNobody(scratch);
  if (prefix.length > 0) {
    new Deno.Command("chown", { args: ["-R", "65534:65534", scratch.project] }).outputSync();
  }
  Deno.chmodSync(stubborn, 0o555);
  await refuse(scratch, ["--remove-loop=night"], /Cannot remove "/, { prefix });
  assert(!existsSync(join(dir, ".state.loop")) && existsSync(join(dir, "loop.json")));
  Deno.chmodSync(stubborn, 0o755);
  await accept(scratch, ["--remove-loop=night"], { prefix });
  assertEquals(Object.keys(snapshot(dir)), [".state.lock"]);
});

Deno.test("a worktree goes with its loop, unless something would be lost", async (t) => {
  using scratch = makeScratch("a project");
  makeRepository(scratch, scratch.project, { "a.txt": "a\n", ".gitignore": ".automaton/\nout/\n" });
  const remove = ["--remove-loop=night"];
  const isRegistered = () =>
    git(scratch, scratch.project, "worktree", "list").includes("loops/night/worktree");

  await t.step("a clean one is removed, and its branch stays", async () => {
    const worktree = addWorktree(scratch);
    writeFile(join(worktree, "a.txt"), "by the loop\n");
    git(scratch, worktree, "commit", "-qam", "work");
    const head = git(scratch, worktree, "rev-parse", "HEAD");
    writeFile(join(worktree, "out/ignored"), "x");
    await accept(scratch, remove);
    assert(!existsSync(worktree) && !isRegistered());
    assertEquals(git(scratch, scratch.project, "rev-parse", "loop/night"), head);
  });
  const losses: readonly (readonly [string, (worktree: string) => void, RegExp])[] = [
    ["a changed file", (at) => writeFile(join(at, "a.txt"), "x"), /1 uncommitted file, "a.txt" f/],
    ["a new file", (at) => writeFile(join(at, "new\nfile"), "x"), /"new\\nfile" first hint: .*--f/],
    ["commits that are on no branch", (at) => {
      git(scratch, at, "checkout", "-q", "--detach");
      git(scratch, at, "commit", "-q", "--allow-empty", "-m", "x");
    }, /commits that are on no branch/],
    ["files of what is no checkout any more", (at) => Deno.removeSync(join(at, ".git")), /".gitig/],
    ["a worktree that was moved aside", (at) => {
      writeFile(`${at}.2026-11-30/notes`, "x");
    }, /worktree.2026-11-30": it holds 1 uncommitted file, "notes"/],
  ];
  for (const [name, change, words] of losses) {
    await t.step(name, async () => {
      const worktree = addWorktree(scratch);
      change(worktree);
      const before = snapshot(scratch.project);
      await refuse(scratch, remove, words);
      assertEquals(snapshot(scratch.project), before);
      await accept(scratch, [...remove, "--force"]);
      assert(!existsSync(worktree));
      git(scratch, scratch.project, "worktree", "prune");
    });
  }
});

Deno.test("a worktree with a submodule is removed when all of it is elsewhere too", async (t) => {
  using scratch = makeScratch();
  const library = join(scratch.dir, "library");
  makeRepository(scratch, library, { "lib.ts": "x\n" });
  makeRepository(scratch, scratch.project, { ".gitignore": ".automaton/\n" });
  git(scratch, scratch.project, "submodule", "--quiet", "add", library, "library");
  git(scratch, scratch.project, "commit", "-qm", "a library");
  const remove = ["--remove-loop=night"];
  const prepare = () => {
    git(scratch, scratch.project, "worktree", "prune");
    const worktree = addWorktree(scratch);
    git(scratch, worktree, "reset", "-q", "--hard", "main");
    git(scratch, worktree, "submodule", "--quiet", "update", "--init");
    return worktree;
  };
  await t.step("clean", async () => {
    const worktree = prepare();
    await accept(scratch, remove);
    assert(!existsSync(worktree));
  });
  await t.step("with a new file in it", async () => {
    const worktree = prepare();
    writeFile(join(worktree, "library/new"), "x");
    await refuse(scratch, remove, /"library" first/);
    await accept(scratch, [...remove, "--force"]);
  });
  await t.step("with a commit in it that is nowhere else", async () => {
    const worktree = prepare();
    git(scratch, join(worktree, "library"), "commit", "-q", "--allow-empty", "-m", "x");
    git(scratch, worktree, "commit", "-qam", "a newer library");
    await refuse(scratch, remove, /commits in a submodule that were not pushed/);
  });
});

Deno.test("loops are listed with what a person wants to know", async (t) => {
  using scratch = makeScratch();
  await t.step("none", async () => {
    const { stdout, stderr, code } = await status(scratch, ["--loop-list"]);
    assertEquals([code, stdout], [0, "no loops\n"]);
    assertMatch(stderr, /^hint: status --create-loop /);
  });
  await t.step("some", async () => {
    const tenMinutesAgo = new Date(Date.now() - 600_000);
    const woken = writeLoop(scratch, "b-woken", {}, { last_tick_at: daysAgo(3) });
    writeFile(join(woken, ".state.lock"), JSON.stringify({ pid: 1 }));
    Deno.utimeSync(join(woken, ".state.lock"), tenMinutesAgo, tenMinutesAgo);
    writeLoop(scratch, "a-halted", {}, {
      status: "halted",
      halt_reason: "drift_detected",
      iteration_count: 12,
      score_history: [0.4, 0.75],
      current_task: "one",
      last_tick_at: daysAgo(3),
    });
    const broken = writeLoop(scratch, "c-broken");
    writeFile(join(broken, ".state.loop"), "");
    writeFile(join(scratch.project, ".automaton/loops/d-only-logs/.state.log"), "");
    const { stdout } = await status(scratch, ["--loop-list"]);
    const [header, ...rows] = stdout.trimEnd().split("\n").map((line) => line.split(/ {2,}/));
    assertEquals(header, [
      "LOOP",
      "STATUS",
      "TICKS",
      "SCORES",
      "TASK",
      "SCHEDULE",
      "LAST WAKE",
    ]);
    assertEquals(rows[0], [
      "a-halted",
      "halted (drift_detected)",
      "12",
      "0.40 0.75",
      "one",
      "-",
      "3 days ago",
    ]);
    assertEquals(rows[1], ["b-woken", "running", "0", "-", "-", "-", "10 min ago"]);
    assertEquals(rows[2]?.slice(0, 2), ["c-broken", "broken"]);
    assertMatch(`${rows[2]?.at(-1)}`, /it is empty$/);
    assertEquals(rows.length, 3);
    const { loops } = await accept(scratch, ["--loop-list"]);
    const [first, second] = loops as Json[];
    assertEquals(first, {
      name: "a-halted",
      status: "halted",
      halt_reason: "drift_detected",
      iteration_count: 12,
      last_tick_at: first!.last_tick_at,
      schedule: null,
      current_task: "one",
      resumed_count: 0,
      score_history: [0.4, 0.75],
      last_wake_at: first!.last_tick_at,
      problem: null,
    });
    assertEquals(second!.last_wake_at, tenMinutesAgo.toISOString());
  });
});

Deno.test("a log is shown from its end, in words or as data, also across its rotations", async (t) => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night");
  const lines = Array.from(
    { length: 60 },
    (_, index) => JSON.stringify({ at: `t${index}`, level: "INFO", event: "TICK", n: index }),
  );
  await t.step("an empty one", async () => {
    assertEquals((await status(scratch, ["--loop-log=night"])).stdout, "the log is empty\n");
  });
  for (const [suffix, from, to] of [[".2", 0, 20], [".1", 20, 50], ["", 50, 60]] as const) {
    writeFile(join(dir, `.state.log${suffix}`), lines.slice(from, to).join("\n") + "\n");
  }
  const numbers = async (...args: string[]) => {
    const { lines } = await accept(scratch, ["--loop-log=night", ...args]);
    return (lines as Json[]).map(({ n }) => n);
  };
  await t.step("the last twenty", async () => {
    assertEquals(await numbers(), Array.from({ length: 20 }, (_, index) => index + 40));
  });
  await t.step("as many as are asked for", async () => {
    assertEquals(await numbers("--lines=3"), [57, 58, 59]);
    assertEquals((await numbers("--lines=45")).length, 45);
    assertEquals((await numbers("--lines=45"))[0], 15);
    assertEquals((await numbers("--lines=1000")).length, 60);
  });
  await t.step("in words, whatever is in it", async () => {
    const odd = { at: "T", level: "ERROR", event: "HALTED", detail: 'a "b"\u001b[2J', by: "x" };
    writeFile(join(dir, ".state.log"), `${lines[0]}\n\n${JSON.stringify(odd)}\n{"torn": \u001b`);
    const { stdout } = await status(scratch, ["--loop-log=night", "--lines=3"]);
    assertEquals(stdout.split("\n"), [
      "t0 TICK n=0",
      'T ERROR HALTED detail="a \\"b\\"\\u001b[2J" by="x"',
      '"{\\"torn\\": \\u001b"',
      "",
    ]);
  });
});

Deno.test("--follow prints what is appended, across a rotation, until it is ended", async () => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night");
  const path = join(dir, ".state.log");
  const line = (n: number) => JSON.stringify({ at: "t", level: "INFO", event: "TICK", n }) + "\n";
  writeFile(path, line(1) + line(2) + line(3));
  const args = ["--loop-log=night", "--lines=2", "--follow"];
  const child = startProgram(scratch, "status", args);
  let seen = "";
  const reading = (async () => {
    for await (const text of child.stdout.pipeThrough(new TextDecoderStream())) seen += text;
  })();
  const until = (n: number) =>
    poll(`line ${n}`, () => seen.includes(`n=${n}\n`), { describe: () => seen });
  await until(3);
  Deno.writeTextFileSync(path, line(4), { append: true });
  await until(4);
  Deno.writeTextFileSync(path, line(5).slice(0, 9), { append: true });
  Deno.writeTextFileSync(path, line(5).slice(9) + line(6), { append: true });
  Deno.renameSync(path, `${path}.1`);
  Deno.writeTextFileSync(path, line(7));
  await until(7);
  Deno.writeTextFileSync(path, line(8), { append: true });
  await until(8);
  child.kill("SIGTERM");
  const { signal } = await child.status;
  await reading;
  await child.stderr.cancel();
  assertEquals(signal, "SIGTERM");
  assertEquals(seen.trimEnd().split("\n").map((each) => each.slice(-1)), [..."2345678"]);
});

Deno.test("--follow ends when nobody reads any more", async () => {
  using scratch = makeScratch();
  const path = join(writeLoop(scratch, "night"), ".state.log");
  writeFile(path, '{"n":1}\n');
  const child = startProgram(scratch, "status", ["--loop-log=night", "--follow", "--json"]);
  const reader = child.stdout.getReader();
  assertEquals(new TextDecoder().decode((await reader.read()).value), '{"n":1}\n');
  await reader.cancel();
  let hasEnded = false;
  const ended = child.status.finally(() => hasEnded = true);
  await poll("end", () => {
    Deno.writeTextFileSync(path, '{"n":2}\n', { append: true });
    return hasEnded;
  });
  const stderr = await new Response(child.stderr).text();
  assertEquals([(await ended).code, stderr], [0, ""]);
});

Deno.test({
  name: "a pipe in the place of a log is refused, also by --follow",
  ignore: Deno.build.os === "windows",
  fn: async () => {
    using scratch = makeScratch();
    const path = join(writeLoop(scratch, "night"), ".state.log");
    new Deno.Command("mkfifo", { args: [path] }).outputSync();
    for (const flags of [[], ["--follow"]]) {
      await refuse(scratch, ["--loop-log=night", ...flags], /Cannot read .*no regular file/, {
        timeoutMs: 10_000,
      });
    }
  },
});

Deno.test("a log that cannot be written stops no brake", async () => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night");
  Deno.mkdirSync(join(dir, ".state.log"));
  const { code, stderr } = await status(scratch, ["--halt-loop=night", "--reason=drift_detected"]);
  assertEquals(code, 0);
  assertStringIncludes(stderr, "warning: Cannot write");
  assertEquals(state(scratch).status, "halted");
});

Deno.test("a log is rotated at 5 MiB, and three are kept", async () => {
  using scratch = makeScratch();
  const dir = writeLoop(scratch, "night");
  const path = join(dir, ".state.log");
  for (const suffix of ["", ".1", ".2", ".3"]) writeFile(path + suffix, `{"of":"log${suffix}"}\n`);
  writeFile(path, "x".repeat(5 * 1024 * 1024));
  await accept(scratch, ["--pause-loop=night"]);
  assertEquals(readLog(scratch, "night").map(({ event }) => event), ["PAUSED"]);
  assertEquals(Deno.statSync(`${path}.1`).size, 5 * 1024 * 1024);
  assertEquals(readJson(`${path}.2`).of, "log.1");
  assertEquals(readJson(`${path}.3`).of, "log.2");
  assert(!existsSync(`${path}.4`));
});
