/** status: state files that are damaged, newer, or cut off in the middle of a save. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import { parseLoopState, parseTaskState } from "../scripts/status.ts";
import {
  loopDir,
  makeScratch,
  poll,
  readJson,
  readLog,
  type Scratch,
  snapshot,
  startProgram,
  taskDir,
  writeFile,
  writeLoop,
  writeTask,
} from "./helpers.ts";
import { accept, refuse, status } from "./status_support.ts";

const GATE = ["--check-gate=night"];

/** What can have happened to a state file; each takes the good text. */
const DAMAGES: Readonly<Record<string, (text: string) => string>> = {
  "cut in half": (text) => text.slice(0, text.length / 2),
  "of no length": () => "",
  "blank": () => "\n",
  "full of NULs": (text) => "\0".repeat(text.length),
  "ended in NULs": (text) => text.slice(0, -20) + "\0".repeat(20),
  "a list": (text) => `[${text}]`,
  "null": () => "null",
  "with a field of another type": (text) => text.replace(/"name":"[^"]*"/, '"name":7'),
  "with a field missing": (text) => text.replace(/"name":"[^"]*",/, ""),
  "without a version": (text) => text.replace('"schema_version":1,', ""),
  "of version 0": (text) => text.replace('"schema_version":1', '"schema_version":0'),
  "of a version in words": (text) => text.replace('"schema_version":1', '"schema_version":"1"'),
  "two states in one": (text) => text + text,
};

/** The `.state.loop.bad-…` or `.state.bad-…` files of a folder, as texts. */
function readBad(dir: string): string[] {
  return Object.entries(snapshot(dir)).filter(([name]) => name.includes(".bad-"))
    .map(([, text]) => text);
}

/** Writes a loop with some history; returns the text of its state. */
function writeOldLoop(scratch: Scratch): { dir: string; path: string; text: string } {
  const dir = writeLoop(scratch, "night", {}, { iteration_count: 7, resumed_count: 2 });
  const path = join(dir, ".state.loop");
  return { dir, path, text: Deno.readTextFileSync(path) };
}

for (const [damage, apply] of Object.entries(DAMAGES)) {
  Deno.test(`a loop's state that is ${damage} is restored, or halts the loop, and never lost`, async (t) => {
    await t.step("with a good copy it is restored, shown and logged", async () => {
      using scratch = makeScratch();
      const { dir, path, text } = writeOldLoop(scratch);
      const damaged = apply(text);
      writeFile(path, damaged);
      writeFile(`${path}.bak`, text);
      const { code, stdout, stderr } = await status(scratch, [...GATE, "--json"]);
      assertEquals([code, JSON.parse(stdout).reason], [0, "ok"]);
      assertMatch(
        stderr,
        /^warning: Cannot .*\.state\.loop.*; restored from .*\.state\.loop\.bak\n$/,
      );
      assertEquals(Deno.readTextFileSync(path), text);
      assertEquals(readBad(dir), [damaged]);
      const [{ event, level }, ...more] = readLog(scratch, "night") as [Record<string, unknown>];
      assertEquals([event, level, more], ["STATE_RESTORED", "ERROR", []]);
    });
    await t.step("without one the loop is halted, with the counters of its log", async () => {
      using scratch = makeScratch();
      const { dir, path, text } = writeOldLoop(scratch);
      const damaged = apply(text);
      writeFile(path, damaged);
      writeFile(
        join(dir, ".state.log"),
        '{"event":"TICK","iteration_count":7}\n{"event":"TICK","iteration_count":6}\n',
      );
      writeFile(join(dir, ".state.log.1"), '{"event":"APPROVED","resumed_count":2}\n');
      const { code, stdout, stderr } = await status(scratch, [...GATE, "--json"]);
      assertEquals([code, JSON.parse(stdout).reason], [0, "halted:human_intervention"]);
      assertStringIncludes(stderr, "the loop is halted for a person to look at");
      const { status: word, halt_reason, iteration_count, resumed_count } = readJson(path);
      assertEquals([word, halt_reason], ["halted", "human_intervention"]);
      assertEquals([iteration_count, resumed_count], [7, 2]);
      assertEquals(readBad(dir), [damaged]);
      assertEquals(readLog(scratch, "night").at(-1)?.event, "HALTED");
    });
    await t.step("with a copy damaged in the same way it is halted too", async () => {
      using scratch = makeScratch();
      const { dir, path, text } = writeOldLoop(scratch);
      writeFile(path, apply(text));
      writeFile(`${path}.bak`, apply(text));
      assertEquals((await accept(scratch, GATE)).reason, "halted:human_intervention");
      assertEquals(readBad(dir), [apply(text)]);
    });
  });
}

Deno.test("a person's command on a loop with a lost state halts it and does nothing else", async (t) => {
  const cases: readonly (readonly [args: readonly string[], words: RegExp])[] = [
    [["--approve", "--loop=night"], /is halted \(human_intervention\) now; its state was damaged/],
    [["--pause-loop=night"], /it is halted \(human_intervention\), so it does not tick/],
    [["--resume-loop=night"], /it is halted \(human_intervention\), not paused/],
  ];
  for (const [args, words] of cases) {
    await t.step(args.join(" "), async () => {
      using scratch = makeScratch();
      const { dir, path } = writeOldLoop(scratch);
      writeFile(path, "{");
      await refuse(scratch, args, words);
      assertEquals(readJson(path).status, "halted");
      assertEquals(readBad(dir), ["{"]);
      assert(!existsSync(join(dir, "pause.request")));
      await accept(scratch, ["--approve", "--loop=night"]);
      assertEquals(readJson(path).status, "running");
    });
  }
});

Deno.test("a halt for a lost state is a whole one: its hook runs, and no log stands in its way", async () => {
  using scratch = makeScratch();
  const { dir, path } = writeOldLoop(scratch);
  const told = join(scratch.dir, "told");
  const config = { ...readJson(join(dir, "loop.json")), hooks: { on_halt: ["touch", told] } };
  writeFile(join(dir, "loop.json"), JSON.stringify(config));
  Deno.mkdirSync(join(dir, ".state.log"));
  writeFile(path, "{");
  for (const wanted of [["{"], ["{"]]) {
    assertEquals((await accept(scratch, GATE)).reason, "halted:human_intervention");
    assertEquals([readJson(path).status, readBad(dir)], ["halted", wanted]);
  }
  assert(existsSync(told));
});

Deno.test("looking at a damaged loop repairs nothing and tells what is wrong", async () => {
  using scratch = makeScratch();
  const { dir, path, text } = writeOldLoop(scratch);
  writeFile(path, "{");
  writeFile(`${path}.bak`, text);
  const before = snapshot(dir);
  await refuse(scratch, ["--can-continue=night"], /Cannot parse ".*\.state\.loop"/);
  const { loops } = await accept(scratch, ["--loop-list"]);
  const [loop] = loops as Record<string, unknown>[];
  assertEquals([loop?.name, loop?.status], ["night", null]);
  assertMatch(`${loop?.problem}`, /Cannot parse ".*\.state\.loop"/);
  assertEquals(snapshot(dir), before);
});

Deno.test("a task's state that is damaged is restored, or refused and left alone", async (t) => {
  using scratch = makeScratch();
  const claim = ["--claim", "--task=one", "--session=me"];
  for (const [damage, apply] of Object.entries(DAMAGES)) {
    const dir = writeTask(scratch, "one", "implement");
    const path = join(dir, ".state");
    const text = Deno.readTextFileSync(path);
    await t.step(`${damage}, with a good copy`, async () => {
      writeFile(path, apply(text));
      writeFile(`${path}.bak`, text);
      const { code, stderr } = await status(scratch, claim);
      assertEquals(code, 0, stderr);
      assertMatch(stderr, /^warning: Cannot .*; restored from .*\.state\.bak\n$/);
      assertEquals([readJson(path).phase, readJson(path).claimed_by], ["implement", "me"]);
      assertEquals(readBad(dir), [apply(text)]);
    });
    for (const copy of [null, "{"]) {
      await t.step(`${damage}, with ${copy === null ? "no" : "a bad"} copy`, async () => {
        Deno.removeSync(dir, { recursive: true });
        writeFile(path, apply(text));
        if (copy !== null) writeFile(`${path}.bak`, copy);
        const before = snapshot(dir);
        await refuse(scratch, claim, /\.state".* hint: repair .*\.state by hand/);
        await refuse(scratch, ["--task=one"], /\.state".* hint: correct that file/);
        assertEquals(snapshot(dir, [".state.lock"]), before);
      });
    }
    Deno.removeSync(dir, { recursive: true });
  }
});

Deno.test("a byte order mark is no damage", async () => {
  using scratch = makeScratch();
  const { dir, path, text } = writeOldLoop(scratch);
  writeFile(path, `\uFEFF${text}`);
  assertEquals((await accept(scratch, GATE)).ok, true);
  const state = join(writeTask(scratch, "one"), ".state");
  writeFile(state, `\uFEFF${Deno.readTextFileSync(state)}`);
  await accept(scratch, ["--claim", "--task=one", "--session=me"]);
  assertEquals(readBad(dir), []);
});

Deno.test("what a newer edition wrote is refused and never touched", async (t) => {
  const newer = (text: string) => text.replace('"schema_version":1', '"schema_version":2');
  const words = /schema_version 2 is newer than 1, .* hint: update Automaton/;
  await t.step("a loop's state", async () => {
    using scratch = makeScratch();
    const { dir, path, text } = writeOldLoop(scratch);
    writeFile(path, newer(text));
    writeFile(`${path}.bak`, text);
    const before = snapshot(dir);
    const reason = "--reason=human_intervention";
    for (
      const args of [
        GATE,
        ["--can-continue=night"],
        ["--resume-loop=night"],
        ["--halt-loop=night", reason],
        ["--approve", "--loop=night"],
      ]
    ) await refuse(scratch, args, words);
    assertEquals(snapshot(dir, [".state.lock"]), before);
  });
  await t.step("a copy beside a damaged state", async () => {
    using scratch = makeScratch();
    const { dir, path, text } = writeOldLoop(scratch);
    writeFile(path, "");
    writeFile(`${path}.bak`, newer(text));
    const before = snapshot(dir);
    await refuse(scratch, GATE, words);
    assertEquals(snapshot(dir, [".state.lock"]), before);
  });
  await t.step("a task's state", async () => {
    using scratch = makeScratch();
    const dir = writeTask(scratch, "one");
    writeFile(join(dir, ".state"), newer(Deno.readTextFileSync(join(dir, ".state"))));
    const before = snapshot(dir);
    await refuse(scratch, ["--claim", "--task=one", "--session=me"], words);
    await refuse(scratch, ["--task=one"], words);
    assertEquals(snapshot(dir, [".state.lock"]), before);
  });
});

Deno.test("optional fields may be missing, and fields that nobody knows are kept", async () => {
  using scratch = makeScratch();
  const { path, text } = writeOldLoop(scratch);
  const extra = { from_later: [1, { deep: "ü" }], iteration_base: 3 };
  writeFile(path, JSON.stringify({ ...JSON.parse(text), ...extra }));
  await accept(scratch, ["--halt-loop=night", "--reason=human_intervention"]);
  const { from_later, iteration_base } = readJson(path);
  assertEquals({ from_later, iteration_base }, extra);
  assertEquals(Deno.readTextFileSync(`${path}.bak`), Deno.readTextFileSync(path));
});

Deno.test("parseLoopState() and parseTaskState() name the field, what was found and what was wanted", () => {
  using scratch = makeScratch();
  const loop = readJson(join(writeLoop(scratch, "night"), ".state.loop"));
  const task = readJson(join(writeTask(scratch, "one"), ".state"));
  const wrong: Readonly<Record<string, readonly unknown[]>> = {
    name: [7, null],
    status: ["asleep", null],
    halt_reason: ["tired"],
    iteration_count: [-1, 1.5, "7", null],
    resumed_count: [-1],
    last_tick_at: ["yesterday", 7],
    last_verdict: ["pass", []],
    score_history: [0.4, ["0.4"], null],
    current_task: ["../x", 7],
    worktree_path: [7],
    iteration_base: ["0"],
    not_before: ["soon"],
    pass_history: [["true"]],
  };
  for (const [field, values] of Object.entries(wrong)) {
    for (const value of values) {
      const message = messageOf(() =>
        parseLoopState(JSON.stringify({ ...loop, [field]: value }), "the file")
      );
      assertStringIncludes(message, `Cannot use "the file": field ${field}: found `);
      assertStringIncludes(message, `${JSON.stringify(value)}, wanted `);
    }
  }
  const step = { at: "2026-01-01T00:00:00Z", from: null, to: "research", by: "x", reason: null };
  const wrongTask: Readonly<Record<string, readonly unknown[]>> = {
    name: ["../../x", "", null],
    title: [null],
    phase: [null, 4],
    created_at: ["then", null],
    updated_at: [""],
    approved_at: ["yes", true],
    claimed_by: [7],
    loop: ["../x", ""],
    history: [null, {}, [null], [{ ...step, to: null }], [{ ...step, by: undefined }]],
  };
  for (const [field, values] of Object.entries(wrongTask)) {
    for (const value of values) {
      const message = messageOf(() =>
        parseTaskState(JSON.stringify({ ...task, [field]: value }), "the file")
      );
      assertStringIncludes(message, `Cannot use "the file": field ${field}: found `);
    }
  }
});

function messageOf(action: () => unknown): string {
  try {
    action();
  } catch (error) {
    return `${(error as Error).message}`;
  }
  return "no error";
}

Deno.test("a process killed in the middle of a save leaves the old state or the new one", async (t) => {
  using scratch = makeScratch();
  const dir = writeTask(scratch, "one", "research", { ballast: "x".repeat(8_000_000) });
  const path = join(dir, ".state");
  let [killed, session] = [0, "null"];
  for (const [index, file] of [".state.bak", ".state.bak", ".state", ".state", "end"].entries()) {
    await t.step(`kill ${index} while it writes ${file}`, async () => {
      const args = ["--claim", "--task=one", `--session=s${index}`];
      const child = startProgram(scratch, "status", args);
      const temporary = join(dir, `.${file}.tmp-${child.pid}`);
      let hasEnded = false;
      const output = child.output().finally(() => hasEnded = true);
      const isHalfWay = () =>
        sizeOf(temporary) > (index % 2) * 4_000_000 ||
        sizeOf(path) < 8_000_000; // Written in place: the worst moment of all.
      await poll("end, or a file half-written", () => {
        for (let look = 0; look < 2000; look++) if (isHalfWay()) return true;
        return hasEnded;
      });
      if (!hasEnded) child.kill("SIGKILL");
      if ((await output).signal === "SIGKILL") killed++;
      const { claimed_by, ballast } = readJson(path);
      assert([session, `s${index}`].includes(`${claimed_by}`), `${claimed_by}`);
      assertEquals(`${ballast}`.length, 8_000_000);
      session = `${claimed_by}`;
      const release = await status(scratch, ["--release", "--task=one"]);
      assertEquals([release.code, release.stderr], [0, ""], "the next command works");
      session = "null";
    });
  }
  assert(killed >= 2, `only ${killed} processes were killed before they had ended`);
});

function sizeOf(path: string): number {
  try {
    return Deno.statSync(path).size;
  } catch {
    return -1; // Not there yet, or renamed already.
  }
}

Deno.test("a loop's folder that is a link is the loop's folder", async () => {
  using scratch = makeScratch();
  const { dir } = writeOldLoop(scratch);
  const elsewhere = join(scratch.dir, "else where");
  Deno.renameSync(dir, elsewhere);
  Deno.symlinkSync(elsewhere, dir);
  assertEquals((await accept(scratch, GATE)).ok, true);
  const { loops } = await accept(scratch, ["--loop-list"]);
  assertEquals((loops as Record<string, unknown>[]).map(({ name }) => name), ["night"]);
  await accept(scratch, ["--pause-loop=night"]);
  assertEquals(readJson(join(elsewhere, ".state.loop")).status, "paused");
  assertEquals(loopDir(scratch, "night"), dir);
});

Deno.test("a task's folder that is a link is seen, and moves as a link", async () => {
  using scratch = makeScratch();
  const dir = writeTask(scratch, "one", "bug_hunt");
  writeFile(join(dir, "BUG_REPORT.md"), "x");
  const elsewhere = join(scratch.dir, "elsewhere");
  Deno.renameSync(dir, elsewhere);
  Deno.symlinkSync(elsewhere, dir);
  assertEquals((await accept(scratch, ["--audit"])).total_tasks, 1);
  await accept(scratch, ["--transition=complete", "--task=one"]);
  assertEquals(readJson(join(elsewhere, ".state")).phase, "complete");
  assertEquals(Deno.readLinkSync(taskDir(scratch, "complete/one")), elsewhere);
});
