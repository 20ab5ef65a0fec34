/** loop-runner under a schedule that wakes it more often than it ticks; and the schedule's log. */
import { assert, assertEquals, assertMatch } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import {
  lastJson,
  loopDir,
  makeRepository,
  makeScratch,
  readJson,
  readLog,
  type Result,
  runProgram,
  type Scratch,
  snapshot,
  writeFile,
  writeLoop,
  writeScript,
  writeTask,
} from "./helpers.ts";

const ignore = Deno.build.os === "windows";
const MINUTE_MS = 60_000;
const DUE = { AUTOMATON_DUE_INTERVAL_S: "420", AUTOMATON_DUE_PERIOD_S: "60" };

const slotBefore = (minutes: number): string =>
  new Date(Math.round(Date.now() / MINUTE_MS - minutes) * MINUTE_MS).toISOString();
const statePath = (scratch: Scratch): string => join(loopDir(scratch, "night"), ".state.loop");

/** A tick as the generated script starts it. */
function tick(
  scratch: Scratch,
  env: Readonly<Record<string, string>> = DUE,
  ...args: string[]
): Promise<Result> {
  const words = ["--mode", "tick", "--loop", "night", ...args];
  return runProgram(scratch, "loop-runner", words, {
    env: { AUTOMATON_CONTEXT_TOKENS: "32768", ...env },
  });
}

/** A loop whose agent writes down its environment and whose verifier passes it. */
function prepareWork(scratch: Scratch, state: Readonly<Record<string, unknown>>): void {
  makeRepository(scratch);
  writeTask(scratch, "job", "research", { loop: "night" });
  writeScript(
    join(scratch.bin, "agent"),
    `#!/bin/sh
env >"$AUTOMATON_PROJECT/../environment"
[ "$1" != verify ] || echo '{"pass": true, "score": 1}'
`,
  );
  const config = {
    harness: { command: ["agent", "{role}"], stdin: "none" },
    roles: { orchestrate: null },
  };
  writeLoop(scratch, "night", config, { current_task: "job", ...state });
}

function assertRecentSlot(slot: unknown): void {
  const slotMs = Date.parse(`${slot}`);
  assertEquals(slotMs % MINUTE_MS, 0);
  assert(Math.abs(slotMs - Date.now()) < 2 * MINUTE_MS, `${slot}`);
}

Deno.test({
  name: "a wake before the interval is over is no tick: nothing is written or said",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    writeLoop(scratch, "night", {}, { last_slot: slotBefore(3) });
    const before = snapshot(scratch.project);
    const { code, stdout, stderr } = await tick(scratch);
    assertEquals([code, stdout, stderr], [0, "", ""]);
    const summary = lastJson(await tick(scratch, DUE, "--json"));
    assertEquals([summary.ok, summary.skipped, summary.reason], [true, true, "not_due"]);
    assertEquals(snapshot(scratch.project), before);
  },
});

Deno.test({
  name: "a due tick that is skipped has had its slot",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    for (const last_slot of [null, slotBefore(9), slotBefore(-60)]) {
      writeLoop(scratch, "night", {}, { last_slot, an_unknown_field: 1 });
      const first = lastJson(await tick(scratch, DUE, "--json"));
      assertEquals(first.reason, "no_current_task");
      const state = readJson(statePath(scratch));
      assertRecentSlot(state.last_slot);
      assertEquals([state.an_unknown_field, state.iteration_count], [1, 0]);
      assertEquals(lastJson(await tick(scratch, DUE, "--json")).reason, "not_due");
    }
  },
});

Deno.test({
  name: "so has one that finds its loop halted",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    writeLoop(scratch, "night", {}, { iteration_count: 10 });
    await tick(scratch);
    const { status, last_slot } = readJson(statePath(scratch));
    assertEquals(status, "halted");
    assertRecentSlot(last_slot);
  },
});

Deno.test({
  name: "a tick that works keeps its slot in its one save, and its agents do not know of it",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    prepareWork(scratch, { last_slot: slotBefore(7) });
    const summary = lastJson(await tick(scratch, DUE, "--json"));
    assertEquals([summary.ok, summary.iteration_count], [true, 1], JSON.stringify(summary));
    assertRecentSlot(readJson(statePath(scratch)).last_slot);
    assertEquals(readJson(`${statePath(scratch)}.bak`), readJson(statePath(scratch)));
    const environment = Deno.readTextFileSync(join(scratch.dir, "environment"));
    assert(!environment.includes("AUTOMATON_DUE"), environment);
  },
});

Deno.test({
  name: "a person's tick, a daemon's and one with nonsense for an interval are always due",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const last_slot = slotBefore(1);
    writeLoop(scratch, "night", {}, { last_slot });
    for (
      const env of [{}, { ...DUE, AUTOMATON_DUE_PERIOD_S: "x" }, {
        ...DUE,
        AUTOMATON_DUE_INTERVAL_S: "0",
      }]
    ) {
      assertEquals(lastJson(await tick(scratch, env, "--json")).reason, "no_current_task");
      assertEquals(readJson(statePath(scratch)).last_slot, last_slot);
    }
    const daemon = ["--mode", "daemon", "--loop", "night", "--max-iterations", "1", "--json"];
    const { last } = lastJson(await runProgram(scratch, "loop-runner", daemon, { env: DUE }));
    assertEquals((last as Record<string, unknown>).reason, "no_current_task");
  },
});

Deno.test({
  name: "a damaged state is for the gate, not a reason to sleep on",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    writeLoop(scratch, "night");
    writeFile(statePath(scratch), "{");
    await tick(scratch);
    assertMatch(readLog(scratch, "night").map(({ event }) => event).join(), /^HALTED/);
  },
});

Deno.test({
  name: "the schedule's log is rotated at five megabytes and three are kept",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    writeLoop(scratch, "night");
    const log = join(loopDir(scratch, "night"), "schedule.log");
    for (const round of ["1", "2", "3", "4"]) {
      writeFile(log, round.repeat(5 * 1024 * 1024 + 1));
      await tick(scratch, {});
      assert(!existsSync(log));
    }
    const kept = [1, 2, 3, 4].map((number) => {
      const path = `${log}.${number}`;
      return existsSync(path) ? Deno.readTextFileSync(path)[0] : null;
    });
    assertEquals(kept, ["4", "3", "2", null]);
    writeFile(log, "short\n");
    await tick(scratch, {});
    assertEquals(Deno.readTextFileSync(log), "short\n");
  },
});
