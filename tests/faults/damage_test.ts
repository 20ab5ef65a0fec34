/**
 * Damaged files: what a loop and a task remember, what steers them, what they cost. Each damage is told in
 * one clear line, nothing is overwritten before it is kept, and no counter of a brake starts anew.
 */
import { assertEquals } from "@std/assert";
import { existsSync } from "@std/fs";
import { dirname, join } from "@std/path";
import {
  lastJson,
  makeRepository,
  makeScratch,
  readJson,
  readLog,
  runProgram,
  type Scratch,
  writeFile,
  writeLoop,
  writeScript,
  writeTask,
} from "../helpers.ts";
import { chooseCases, IS_FULL, listHeldLocks, listLiving, runAll, Tally } from "./support.ts";

const [SEVEN, TWO] = [7, 2];
const AT = "2026-01-01T00:00:00Z";

/** How a file comes to harm. */
interface Damage {
  readonly name: string;
  /** Usable: still the same to a reader. Newer: another edition's. Damaged: nobody can use it. */
  readonly kind: "usable" | "newer" | "damaged";
  /** Puts the harm in the place of a whole file. */
  readonly harm: (path: string, text: string) => void;
}

const write = (change: (text: string) => string | Uint8Array<ArrayBuffer>): Damage["harm"] => {
  return (path, text) => {
    const content = change(text);
    if (typeof content === "string") Deno.writeTextFileSync(path, content);
    else Deno.writeFileSync(path, content);
  };
};
const withField = (text: string, field: string, value: string): string =>
  text.replace(/^\{/, `{${JSON.stringify(field)}: ${value},`);
const inItsPlace = (argv: readonly string[]): Damage["harm"] => (path) => {
  Deno.removeSync(path);
  const { success } = new Deno.Command(argv[0]!, { args: [...argv.slice(1), path] }).outputSync();
  if (!success) throw new Error(`cannot ${argv.join(" ")}`);
};

const DAMAGES: readonly Damage[] = [
  { name: "a byte order mark", kind: "usable", harm: write((text) => `\uFEFF${text}`) },
  { name: "CRLF", kind: "usable", harm: write((text) => text.replaceAll(",", ",\r\n")) },
  { name: "a link to the file", kind: "usable", harm: linkTo },
  { name: "empty", kind: "damaged", harm: write(() => "") },
  { name: "blank", kind: "damaged", harm: write(() => " \n\t\n") },
  { name: "torn", kind: "damaged", harm: write((text) => text.slice(0, text.length / 2)) },
  { name: "its last byte is missing", kind: "damaged", harm: write((text) => text.slice(0, -1)) },
  { name: "NULs", kind: "damaged", harm: write((text) => "\0".repeat(text.length)) },
  { name: "NULs at its end", kind: "damaged", harm: write((text) => `${text}\0\0\0`) },
  { name: "twice", kind: "damaged", harm: write((text) => text + text) },
  { name: "UTF-16", kind: "damaged", harm: write(toUtf16) },
  { name: "escape sequences", kind: "damaged", harm: write(() => "\x1b[2J\x1b]0;hello\x07{") },
  { name: "a conflict of git", kind: "damaged", harm: write((text) => `<<<<<<< HEAD\n${text}`) },
  { name: "a list", kind: "damaged", harm: write(() => "[]") },
  { name: "null", kind: "damaged", harm: write(() => "null") },
  { name: "a text", kind: "damaged", harm: write((text) => JSON.stringify(text)) },
  {
    name: "100,000 levels",
    kind: "damaged",
    harm: write(() => "[".repeat(100_000) + "]".repeat(100_000)),
  },
  {
    name: "100,000 levels in a field",
    kind: "damaged",
    harm: write((text) => withField(text, "more", '{"a":'.repeat(1e5) + "1" + "}".repeat(1e5))),
  },
  { name: "50 MB of blanks", kind: "damaged", harm: write(() => " ".repeat(5e7)) },
  {
    name: "50 MB in a field",
    kind: "damaged",
    harm: write((text) => withField(text, "more", `"${"x".repeat(5e7)}"`)),
  },
  { name: "a folder", kind: "damaged", harm: inItsPlace(["mkdir"]) },
  { name: "a pipe", kind: "damaged", harm: inItsPlace(["mkfifo"]) },
  { name: "a link to a device", kind: "damaged", harm: inItsPlace(["ln", "-s", "/dev/zero"]) },
];

function linkTo(path: string): void {
  Deno.renameSync(path, `${path}.elsewhere`);
  Deno.symlinkSync(`${path}.elsewhere`, path);
}

function toUtf16(text: string): Uint8Array<ArrayBuffer> {
  const bytes = new Uint8Array(text.length * 2 + 2);
  bytes.set([0xff, 0xfe]);
  for (let at = 0; at < text.length; at++) bytes[2 * at + 2] = text.charCodeAt(at);
  return bytes;
}

/** Fields with values of another kind than they have, and ones that stand twice or are missing. */
const fieldDamages = (fields: Readonly<Record<string, string>>): Damage[] =>
  Object.entries(fields).map(([field, value]): Damage => ({
    name: value === "" ? `${field} twice` : `${field} is ${value}`,
    kind: "damaged",
    harm: write((text) => {
      const own = JSON.parse(text)[field];
      if (value === "") return withField(text, field, JSON.stringify(own));
      const { [field]: _, ...others } = JSON.parse(text);
      return withField(JSON.stringify(others), field, value);
    }),
  }));

const FUTURE: Damage = {
  name: "a newer edition's",
  kind: "newer",
  harm: write((text) => text.replace('"schema_version":1', '"schema_version":2')),
};

/** A file that can come to harm, and the damages that only it can have. */
interface Subject {
  readonly name: string;
  readonly path: (scratch: Scratch) => string;
  readonly text: string;
  readonly own: readonly Damage[];
}

const LOOP_STATE = {
  schema_version: 1,
  name: "night",
  status: "running",
  halt_reason: null,
  iteration_count: SEVEN,
  resumed_count: TWO,
  last_tick_at: AT,
  last_verdict: null,
  score_history: [0.5],
  current_task: "work",
  worktree_branch: null,
  worktree_path: null,
  iteration_base: 1,
  later: "a field that this edition does not know",
};

const TASK_STATE = {
  schema_version: 1,
  name: "work",
  title: "work",
  phase: "implement",
  previous_phase: null,
  created_at: AT,
  updated_at: AT,
  approved_at: AT,
  claimed_by: null,
  loop: "night",
  history: [{ at: AT, from: null, to: "implement", by: "person", reason: null }],
};

const LOOP_CONFIG = {
  name: "night",
  work_source: { kind: "single" },
  roles: { orchestrate: null },
  brakes: { max_iterations: 10, max_budget_usd: 5 },
  blast_radius: { worktree: false },
  harness: {
    command: ["agent", "{role}"],
    stdin: "prompt",
    usage: { cost_usd: "cost", text: "text" },
  },
};

const loopFile = (name: string) => (scratch: Scratch): string =>
  join(scratch.project, ".automaton", "loops", "night", name);

const SUBJECTS: readonly Subject[] = [
  {
    name: ".state.loop",
    path: loopFile(".state.loop"),
    text: JSON.stringify(LOOP_STATE),
    own: [
      FUTURE,
      ...fieldDamages({
        schema_version: '"1"',
        status: '"Running"',
        halt_reason: '"tired"',
        iteration_count: "-1",
        resumed_count: '"2"',
        last_tick_at: '"yesterday"',
        score_history: "[null]",
        current_task: '"../work"',
        iteration_base: "8",
        not_before: '"soon"',
        pass_history: '"true"',
      }),
      ...fieldDamages({ iteration_count: "1e400" }),
      ...fieldDamages({ iteration_count: "" }),
    ],
  },
  {
    name: ".state",
    path: (scratch) => join(scratch.project, ".automaton", "tasks", "work", ".state"),
    text: JSON.stringify(TASK_STATE),
    own: [
      FUTURE,
      ...fieldDamages({ phase: "3", history: "{}", approved_at: "true", loop: '"a b"' }),
      ...fieldDamages({ phase: "", history: '[{"to": "implement"}]' }),
    ],
  },
  {
    name: "loop.json",
    path: loopFile("loop.json"),
    text: JSON.stringify(LOOP_CONFIG),
    own: [
      ...fieldDamages({ brakes: "[]", harness: "7", checks: '[["a"], "b"]' }),
      ...fieldDamages({ brakes: '{"max_iterations": "10"}', work_source: '{"kind": 7}' }),
      ...fieldDamages({ brakes: "" }),
    ],
  },
  {
    name: "models.json",
    path: (scratch) => join(scratch.project, ".automaton", "models.json"),
    text: JSON.stringify({ models: { a: { context_tokens: 32000 } }, default: "a" }),
    own: fieldDamages({ models: "[]", default: "7", conflicts: '[["a"]]' }),
  },
  {
    name: "cost.json",
    path: loopFile("cost.json"),
    text: JSON.stringify({ total_usd: 2, by: "somebody" }),
    own: [...fieldDamages({ total_usd: '"2"', local: "0" }), ...fieldDamages({ total_usd: "" })],
  },
];

/** What stands beside a damaged state file. */
const COPIES = ["a whole copy", "a torn copy", "no copy", "a folder for a copy"] as const;

interface Case {
  readonly subject: Subject;
  readonly damage: Damage;
  readonly copy: typeof COPIES[number] | null;
}

/** An agent whose verifier passes everything, so that whatever stops the tick is not its doing. */
const AGENT = `#!/bin/sh
prompt=$(cat)
[ "$1" = implement ] && { echo '{"text": "done", "cost": 0.25}'; exit; }
nonce=$(printf '%s\\n' "$prompt" | sed -n 's/^"nonce": "\\(.*\\)"$/\\1/p' | tail -n 1)
printf '{"text": "{\\\\"pass\\\\": true, \\\\"score\\\\": 1, \\\\"nonce\\\\": \\\\"%s\\\\"}"}\\n' "$nonce"
`;

function makeProject(): Scratch {
  const bare = makeScratch();
  const scratch = { ...bare, env: { ...bare.env, AUTOMATON_CONTEXT_TOKENS: "32000" } };
  makeRepository(scratch);
  writeScript(join(scratch.bin, "agent"), AGENT);
  writeTask(scratch, "work", "implement");
  writeLoop(scratch, "night", LOOP_CONFIG);
  for (const { path, text } of SUBJECTS) writeFile(path(scratch), text);
  const past = { at: AT, level: "INFO", event: "TICK", iteration_count: 7, resumed_count: 2 };
  writeFile(loopFile(".state.log")(scratch), `${JSON.stringify(past)}\n`);
  return scratch;
}

/** Applies one damage and lets the programs meet it. */
async function meet({ subject, damage, copy }: Case, tally: Tally): Promise<void> {
  using scratch = makeProject();
  const path = subject.path(scratch);
  if (copy === "a whole copy") Deno.copyFileSync(path, `${path}.bak`);
  if (copy === "a torn copy") Deno.writeTextFileSync(`${path}.bak`, subject.text.slice(0, 40));
  if (copy === "a folder for a copy") Deno.mkdirSync(`${path}.bak`);
  damage.harm(path, subject.text);
  tally.tried++;
  const lose = (loss: Parameters<Tally["lose"]>[0], what: string) =>
    tally.lose(loss, `${subject.name} ${damage.name}${copy === null ? "" : `, ${copy}`}: ${what}`);
  const describe = () => describeFile(path);
  const damaged = describe();

  // Whoever only looks changes nothing.
  for (const command of ["--audit", "--loop-list"]) {
    const look = await runProgram(scratch, "status", [command, "--json"]);
    if (look.code !== 0) lose("other", `${command} ended with ${look.code}: ${look.stderr}`);
    if (describe() !== damaged) lose("states lost", `${command} changed the file`);
  }

  const tick = await runProgram(scratch, "loop-runner", ["--mode=tick", "--loop=night", "--json"]);
  const summary = lastJson(tick);
  const warnings = Array.isArray(summary.warnings) ? summary.warnings.map((each) => `${each}`) : [];
  const told = [tick.stderr, summary.message ?? "", ...warnings].join("\n");
  if (tick.code !== 0) lose("other", `the tick ended with exit code ${tick.code}: ${tick.stderr}`);
  const isMentioned = told.includes(subject.name === ".state" ? "work/.state" : subject.name) ||
    told.includes("task work cannot be read");
  if (damage.kind !== "usable" && !isMentioned) lose("other", `nobody told of it: ${told}`);
  // deno-lint-ignore no-control-regex -- they must not reach a terminal.
  if (/\n\s+at |[\u0000-\u0009\u000b-\u001f]/.test(told)) lose("other", `not in clear: ${told}`);
  for (const line of [`${summary.message ?? ""}`, ...warnings]) {
    if (line.length > 600 || line.includes("\n")) lose("other", `not in one line: ${line}`);
  }
  const isDone = summary.skipped === false && summary.verdict !== null;
  if (!isDone && !summary.message) lose("other", `no tick, without words: ${summary.reason}`);

  checkOutcome({ subject, damage, copy }, { scratch, damaged, path, summary }, lose);
  for (const { command } of listLiving(scratch)) lose("processes left", command);
  for (const lock of listHeldLocks(scratch)) lose("stuck locks", lock);
}

/** What a file is and holds, in words to compare; no pipe or device is read. */
function describeFile(path: string): string {
  try {
    const { isSymlink, isFile } = Deno.lstatSync(path);
    if (isSymlink) return `-> ${Deno.readLinkSync(path)}`;
    return isFile ? Deno.readTextFileSync(path) : "no file";
  } catch {
    return "nothing";
  }
}

interface Outcome {
  readonly scratch: Scratch;
  readonly damaged: string;
  readonly path: string;
  readonly summary: Record<string, unknown>;
}

function checkOutcome(
  { subject, damage, copy }: Case,
  { scratch, damaged, path, summary }: Outcome,
  lose: (loss: Parameters<Tally["lose"]>[0], what: string) => void,
): void {
  const state = JSON.parse(describeIfWhole(loopFile(".state.loop")(scratch)) ?? "null");
  if (state === null) return lose("states lost", "there is no whole state any more");
  if (state.iteration_count < SEVEN || state.resumed_count < TWO) {
    lose("states lost", `counters went back: ${JSON.stringify(state)}`);
  }
  // A state that is made anew from the log knows only what the log tells.
  const isRebuilt = subject.name === ".state.loop" && damage.kind === "damaged" &&
    copy !== "a whole copy";
  if (!isRebuilt && state.later !== LOOP_STATE.later) {
    lose("states lost", `a field of a later edition is gone: ${JSON.stringify(state)}`);
  }
  const isTickDone = summary.skipped === false && summary.verdict !== null;
  if (damage.kind === "usable") {
    if (!isTickDone) lose("other", `no tick: ${summary.message}`);
    return;
  }
  const isState = subject.name.startsWith(".state");
  if (damage.kind === "newer" || !isState) {
    if (describeFile(path) !== damaged) lose("states lost", "the file was changed");
    if (isTickDone) lose("wrong passes", "a tick ran on it");
    if (state.iteration_count !== SEVEN) lose("states lost", "a tick was counted");
    return;
  }
  const kept = [...Deno.readDirSync(dirname(path))].map(({ name }) => name)
    .filter((name) => name.startsWith(`${subject.name}.bad-`));
  const isRestored = copy === "a whole copy";
  if (isRestored || subject.name === ".state.loop") {
    const isKept = kept.some((name) => describeFile(join(dirname(path), name)) === damaged);
    if (!isKept) lose("states lost", `the damaged file was not kept: ${kept.join(", ")}`);
  } else if (describeFile(path) !== damaged) lose("states lost", "the file was changed");
  if (isTickDone !== isRestored) lose("other", `tick done: ${isTickDone}, ${summary.message}`);
  if (!isRestored && state.status !== "halted") lose("other", "the loop is not halted");
  const events = readLog(scratch, "night").map(({ event }) => event);
  const wanted = isRestored ? "STATE_RESTORED" : "HALTED";
  if (!events.includes(wanted)) lose("other", `no ${wanted} in the log: ${events.join(", ")}`);
}

function describeIfWhole(path: string): string | null {
  try {
    JSON.parse(Deno.readTextFileSync(path).replace(/^\uFEFF/, ""));
    return Deno.readTextFileSync(path).replace(/^\uFEFF/, "");
  } catch {
    return null;
  }
}

function listCases(): readonly Case[] {
  const cases = SUBJECTS.flatMap((subject) =>
    [...DAMAGES, ...subject.own].flatMap((damage): Case[] => {
      const isState = subject.name.startsWith(".state");
      if (!isState || damage.kind !== "damaged") return [{ subject, damage, copy: null }];
      return COPIES.map((copy) => ({ subject, damage, copy }));
    })
  );
  return chooseCases("damage", cases, 16);
}

Deno.test({
  name: "damaged files are told in a line, kept, and never reset a brake",
  ignore: Deno.build.os === "windows",
  fn: async () => {
    const tally = new Tally("damaged files");
    await runAll(
      listCases().map((each) => async () => {
        try {
          await meet(each, tally);
        } catch (error) {
          const { subject, damage, copy } = each;
          tally.lose("other", `${subject.name} ${damage.name}, ${copy}: ${error}`);
        }
      }),
      Math.max(2, navigator.hardwareConcurrency),
    );
    tally.close();
  },
});

Deno.test("what a session cost is added to a sum that can be read, and to no other", async (t) => {
  for (
    const [name, cost, after] of [
      ["no file yet", null, { total_usd: 0.25 }],
      ["a sum", '{"total_usd": 2, "by": "x"}', { total_usd: 2.25, by: "x" }],
      ["no sum yet", '{"local": true}', { local: true, total_usd: 0.25 }],
    ] as const
  ) {
    await t.step(name, async () => {
      using scratch = makeProject();
      const path = loopFile("cost.json")(scratch);
      Deno.removeSync(path);
      if (cost !== null) Deno.writeTextFileSync(path, cost);
      await runProgram(scratch, "loop-runner", ["--mode=tick", "--loop=night", "--json"]);
      assertEquals(readJson(path), after);
    });
  }
  const damaged = ["[]", '{"total_usd": "2"}', "", "7", '{"total_usd": -1}', '{"total_u'];
  for (const cost of damaged.slice(0, IS_FULL ? damaged.length : 2)) {
    await t.step(`a damaged sum: ${cost}`, async () => {
      using scratch = makeProject();
      const config = { ...LOOP_CONFIG, brakes: {} };
      writeFile(loopFile("loop.json")(scratch), JSON.stringify(config));
      const path = loopFile("cost.json")(scratch);
      Deno.writeTextFileSync(path, cost);
      const args = ["--mode=tick", "--loop=night", "--json"];
      const summary = lastJson(await runProgram(scratch, "loop-runner", args));
      assertEquals([summary.ok, summary.iteration_count], [true, 8], `${summary.message}`);
      assertEquals(Deno.readTextFileSync(path), cost);
      assertEquals(existsSync(`${path}.bak`), false);
    });
  }
});
