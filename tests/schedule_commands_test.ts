/** status and cron: schedules come, pause, go on and go with their loops, and failures cost nothing. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { copySync, existsSync } from "@std/fs";
import { join } from "@std/path";
import {
  holdLock,
  loopDir,
  makeScratch,
  readJson,
  readLog,
  type Scratch,
  snapshot,
  writeLoop,
  writeScript,
} from "./helpers.ts";
import { type Fakes, makeFakes } from "./schedule_support.ts";
import { accept, type Json, misuse, refuse, status } from "./status_support.ts";

const ignore = Deno.build.os === "windows";
const LATIN1 = "# \xe9t\xe9\n0 3 * * * run \\% now\n";

function prepare(scratch: Scratch, table: string | null = LATIN1): Fakes {
  const fakes = makeFakes(scratch, "crontab");
  if (table !== null) writeTable(fakes, table);
  writeLoop(scratch, "night", { harness: { command: ["sh", "-c", ":"] } });
  return fakes;
}

/** A loop that cron has, on a machine with systemd too. */
async function scheduleByCron(scratch: Scratch): Promise<Fakes> {
  const fakes = makeFakes(scratch, "crontab", "systemctl");
  writeTable(fakes, LATIN1);
  writeLoop(scratch, "night");
  await install(scratch, fakes, "--scheduler=cron");
  return fakes;
}

/** Neither cron nor systemd has the loop, and nothing is on record. */
function assertUnscheduled(scratch: Scratch, fakes: Fakes): void {
  assertEquals(readTable(fakes), LATIN1);
  assertEquals([...Deno.readDirSync(join(fakes.dir, "enabled"))], []);
  assert(!existsSync(join(loopDir(scratch, "night"), "schedule.json")));
}

/** A character a byte, as the file may be in any encoding. */
function readTable(fakes: Fakes): string {
  return String.fromCharCode(...Deno.readFileSync(join(fakes.dir, "table")));
}

function writeTable(fakes: Fakes, table: string): void {
  const bytes = Uint8Array.from(table, (character) => character.charCodeAt(0));
  Deno.writeFileSync(join(fakes.dir, "table"), bytes);
}

/** The loop's own lines in the table. */
function ownLines(fakes: Fakes): string[] {
  return readTable(fakes).split("\n").filter((line) => line.endsWith(" # automaton-loop:night"));
}

const install = (scratch: Scratch, fakes: Fakes, ...args: string[]): Promise<Json> =>
  accept(scratch, ["--install-schedule=night", ...args], { env: fakes.env });

const record = (scratch: Scratch): Json =>
  readJson(join(loopDir(scratch, "night"), "schedule.json"));

Deno.test({
  name: "a schedule in a crontab lives and ends with its loop",
  ignore,
  fn: async (t) => {
    using scratch = makeScratch(`it's 100% "x"`);
    const fakes = prepare(scratch);
    const { env } = fakes;
    await t.step("installed: everything is told", async () => {
      const told = await install(scratch, fakes, "--interval=2700");
      assertEquals(told.scheduler, "cron");
      assertEquals([told.interval_seconds, told.exact, told.period_seconds], [2700, true, 2700]);
      assertEquals([told.unit, told.paused, told.agent], ["night", false, "/usr/bin/sh"]);
      const fires = (told.next_fires as string[]).map((at) => Date.parse(at));
      assertEquals(fires.slice(1).map((at, index) => at - fires[index]!), [2_700_000, 2_700_000]);
      assertEquals(ownLines(fakes).length, 4);
      assert(readTable(fakes).startsWith(LATIN1));
    });
    await t.step("again: nothing is written", async () => {
      const before = readTable(fakes);
      fakes.takeCalls();
      await install(scratch, fakes);
      assertEquals(ownLines(fakes).length, 1, "loop.json's own interval is an hour");
      await install(scratch, fakes, "--interval=2700");
      assertEquals(readTable(fakes), before);
      fakes.takeCalls();
      await install(scratch, fakes, "--interval=2700");
      assertEquals(fakes.takeCalls(), ["crontab -l"]);
    });
    await t.step("listed", async () => {
      const { loops } = await accept(scratch, ["--loop-list"], { env });
      const schedule = {
        scheduler: "cron",
        interval_seconds: 2700,
        exact: true,
        period_seconds: 2700,
        unit: "night",
        paused: false,
      };
      assertEquals((loops as Json[])[0]!.schedule, schedule);
      const { stdout } = await status(scratch, ["--loop-list"], { env });
      assertMatch(stdout, /every 45 min \(cron\)/);
      const audit = await accept(scratch, ["--audit"], { env });
      assertEquals((audit.loops as Json[])[0]!.schedule, schedule);
      assertEquals(audit.violations, []);
    });
    await t.step("paused and resumed", async () => {
      const on = readTable(fakes);
      await accept(scratch, ["--pause-loop=night"], { env });
      assert(ownLines(fakes).every((line) => line.startsWith("#")));
      assertEquals(record(scratch).paused, true);
      assertMatch((await status(scratch, ["--loop-list"], { env })).stdout, /\(paused, cron\)/);
      await accept(scratch, ["--resume-loop=night"], { env });
      assertEquals([readTable(fakes), record(scratch).paused], [on, false]);
    });
    await t.step("halted and approved", async () => {
      const on = readTable(fakes);
      await accept(scratch, ["--halt-loop=night", "--reason=human_intervention"], { env });
      assert(ownLines(fakes).every((line) => line.startsWith("#")));
      await accept(scratch, ["--approve", "--loop=night"], { env });
      assertEquals(readTable(fakes), on);
    });
    await t.step("removed with the loop", async () => {
      await accept(scratch, ["--remove-loop=night"], { env });
      assertEquals(readTable(fakes), LATIN1);
    });
  },
});

Deno.test({
  name: "a pause disables the schedule while a tick runs, and leaves the tick alone",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    await install(scratch, fakes);
    using _lock = holdLock(join(loopDir(scratch, "night"), ".state.lock"), { pid: 1 });
    const told = await accept(scratch, ["--pause-loop=night"], { env: fakes.env });
    assertEquals(told.status, "pausing");
    assert(ownLines(fakes).every((line) => line.startsWith("#")));
  },
});

Deno.test({
  name:
    "a brake that trips in a tick stops the schedule, and the gate makes up for one that went on",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    writeLoop(scratch, "night", {}, { iteration_count: 10 });
    await install(scratch, fakes);
    const env = { ...fakes.env, AUTOMATON_NO_LOOP_LOCK: "1", AUTOMATON_LOOP: "night" };
    const { reason } = await accept(scratch, ["--check-gate=night"], { env });
    assertEquals(reason, "halted:iterations_exhausted");
    assert(ownLines(fakes).every((line) => line.startsWith("#")));
    const lines = readTable(fakes);
    writeTable(fakes, lines.replaceAll("\n#0 ", "\n0 "));
    const path = join(loopDir(scratch, "night"), "schedule.json");
    Deno.writeTextFileSync(path, JSON.stringify({ ...record(scratch), paused: false }));
    await accept(scratch, ["--check-gate=night"], { env });
    assertEquals(readTable(fakes), lines);
  },
});

Deno.test({
  name: "a loop that does not run gets its schedule paused, and keeps it so",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    writeLoop(scratch, "night", {}, { status: "paused" });
    const told = await install(scratch, fakes);
    assertEquals([told.paused, told.next_fires], [true, []]);
    assert(ownLines(fakes).every((line) => line.startsWith("#")));
  },
});

Deno.test({
  name: "a table without a final newline, and one that was not there, are as they were in the end",
  ignore,
  fn: async () => {
    for (const table of ["# one\n# no end", ""]) {
      using scratch = makeScratch();
      const fakes = prepare(scratch, table);
      await install(scratch, fakes);
      await install(scratch, fakes, "--interval=5400");
      await accept(scratch, ["--uninstall-schedule=night"], { env: fakes.env });
      assertEquals(readTable(fakes), table);
      const told = await accept(scratch, ["--uninstall-schedule=night"], { env: fakes.env });
      assertEquals([told.removed, told.scheduler], [false, null]);
    }
    using scratch = makeScratch();
    const fakes = prepare(scratch, null);
    await install(scratch, fakes);
    await accept(scratch, ["--uninstall-schedule=night"], { env: fakes.env });
    assertEquals(readTable(fakes), "");
  },
});

/** What crontab does, and how the refusal reads; the table and the loop's folder stay as they were. */
// deno-fmt-ignore -- a table: one row a line.
const FAILURES: readonly (readonly [name: string, script: string, words: RegExp])[] = [
  ["denied", `echo "You (alice) are not allowed to use this program (crontab)" >&2; echo "See crontab(1) for more information" >&2; exit 1`, /You \(alice\) are not allowed/],
  ["broken", `echo "crontab: can't open 'alice': Permission denied" >&2; exit 1`, /Permission denied/],
  ["mute", "exit 1", /exit code 1/],
  ["one that complains", `[ "$1" = -l ] && { echo "no crontab for alice" >&2; exit 1; }; echo "crontab: your $1 is bad" >&2; exit 1`, /is bad; it is as it was/],
  ["one that refuses the table", `[ "$1" = -l ] || { echo "new crontab file is missing newline before EOF, can't install." >&2; exit 1; }`, /missing newline.*as it was/],
  ["one that takes the table and keeps another", `if [ "$1" != -l ] && grep -q automaton "$1"; then echo "# other" >"$FAKE_DIR/table"; exit 0; fi`, /reads back differently.*it is as it was/],
  ["one that says no and yet keeps something", `if [ "$1" != -l ] && grep -q automaton "$1"; then : >"$FAKE_DIR/table"; exit 1; fi`, /exit code 1; it is as it was/],
];

for (const [name, script, words] of FAILURES) {
  Deno.test({
    name: `a crontab that fails is told and changes nothing: ${name}`,
    ignore,
    fn: async () => {
      using scratch = makeScratch();
      const fakes = prepare(scratch);
      fakes.tell("crontab", script);
      const before = snapshot(scratch.project, [".automaton/loops/night/.state.lock"]);
      await refuse(scratch, ["--install-schedule=night", "--scheduler=cron"], words, {
        env: fakes.env,
      });
      assertEquals(readTable(fakes), LATIN1);
      assertEquals(snapshot(scratch.project, [".automaton/loops/night/.state.lock"]), before);
    },
  });
}

Deno.test({
  name: "a crontab that cannot be put back is kept beside the loop, for its owner alone",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    fakes.tell("crontab", `[ "$1" = -l ] || { echo "# other" >"$FAKE_DIR/table"; exit 0; }`);
    const words = /could not be put back hint: .*\.crontab\.backup/;
    await refuse(scratch, ["--install-schedule=night", "--scheduler=cron"], words, {
      env: fakes.env,
    });
    const backup = join(loopDir(scratch, "night"), ".crontab.backup");
    assertEquals(String.fromCharCode(...Deno.readFileSync(backup)), LATIN1);
    assertEquals(Deno.statSync(backup).mode! & 0o777, 0o600);
  },
});

Deno.test({
  name: "a crontab that cannot be put back and holds the line keeps script and record",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    const { env } = fakes;
    fakes.tell(
      "crontab",
      '[ "$1" = -l ] || { { cat "$FAKE_DIR/table"; grep automaton "$1"; echo "# odd"; } >"$FAKE_DIR/new"; mv "$FAKE_DIR/new" "$FAKE_DIR/table"; exit; }',
    );
    const install = ["--install-schedule=night", "--scheduler=cron"];
    const { code, stderr } = await status(scratch, install, { env });
    assertEquals(code, 1);
    assertMatch(stderr, /^warning: .*cron may still have night; .*--uninstall-schedule night/m);
    assertMatch(stderr, /could not be put back/);
    assertEquals(ownLines(fakes).length, 1);
    const dir = loopDir(scratch, "night");
    assert(existsSync(join(dir, "schedule.json")) && existsSync(`${record(scratch).script}`));
    const backup = Deno.readFileSync(join(dir, ".crontab.backup"));
    assertEquals(String.fromCharCode(...backup), LATIN1);
    fakes.tell("crontab", null);
    await accept(scratch, ["--uninstall-schedule=night"], { env });
    assertEquals([ownLines(fakes), existsSync(join(dir, "schedule.json"))], [[], false]);
  },
});

Deno.test({
  name: "a crontab that hangs is given up, and so is a home folder that somebody holds",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    fakes.tell("crontab", "exec sleep 60");
    using held = makeScratch();
    const free = prepare(held);
    using home = Deno.openSync(held.home, { read: true });
    home.lockSync(true);
    const install = ["--install-schedule=night", "--scheduler=cron"];
    await Promise.all([
      refuse(scratch, install, /no answer from crontab within 15 s/, { env: fakes.env }),
      refuse(held, install, /another command has held it for 15 s hint: try again/, {
        env: free.env,
      }),
    ]);
    assertEquals(readTable(free), LATIN1);
    assert(!existsSync(join(loopDir(held, "night"), "schedule.json")));
  },
});

Deno.test({
  name: "busybox's word for no crontab, and warnings beside a table, are no failures",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch, null);
    fakes.tell(
      "crontab",
      `if [ "$1" = -l ] && [ ! -f "$FAKE_DIR/table" ]; then
  echo "crontab: can't open 'alice': No such file or directory" >&2; exit 1; fi
echo "crontab: warning: locale" >&2`,
    );
    await install(scratch, fakes);
    assertEquals(ownLines(fakes).length, 1);
  },
});

Deno.test({
  name: "a machine without any scheduler is told what to do",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    writeLoop(scratch, "night");
    const bin = join(scratch.dir, "only");
    Deno.mkdirSync(bin);
    Deno.symlinkSync("/bin/sh", join(bin, "sh"));
    const words = /systemctl is not installed.*crontab is not installed.* hint: .*--mode daemon/;
    await refuse(scratch, ["--install-schedule=night"], words, { env: { PATH: bin } });
    assert(!existsSync(join(loopDir(scratch, "night"), "schedule.json")));
  },
});

Deno.test({
  name: "a schedule that cannot be stopped never keeps a loop from halting or pausing",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    const { env } = fakes;
    await install(scratch, fakes);
    fakes.tell("crontab", "echo denied >&2; exit 1");
    const halt = await status(scratch, ["--halt-loop=night", "--reason=drift_detected"], { env });
    assertEquals(halt.code, 0);
    assertStringIncludes(halt.stderr, "warning: Cannot pause the schedule: ");
    const levels = readLog(scratch, "night").map(({ event, level }) => `${event} ${level}`);
    assertEquals(levels, ["SCHEDULED INFO", "HALTED WARNING", "WARNING WARNING"]);
    assertEquals(record(scratch).paused, false);
    fakes.tell("crontab", null);
    await accept(scratch, ["--approve", "--loop=night"], { env });
    fakes.tell("crontab", "echo denied >&2; exit 1");
    await accept(scratch, ["--pause-loop=night"], { env });
    const { state } = await accept(scratch, ["--can-continue=night"], { env });
    assertEquals(state, "PAUSED");
  },
});

Deno.test({
  name: "a loop stays while its schedule cannot be taken away, unless it is forced",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    const { env } = fakes;
    await install(scratch, fakes);
    fakes.tell("crontab", "echo denied >&2; exit 1");
    await refuse(scratch, ["--remove-loop=night"], /its schedule stays: .*denied.* --force/, {
      env,
    });
    assert(existsSync(join(loopDir(scratch, "night"), "loop.json")));
    await refuse(scratch, ["--uninstall-schedule=night"], /denied/, { env });
    assert(existsSync(join(loopDir(scratch, "night"), "schedule.json")));
    await accept(scratch, ["--remove-loop=night", "--force"], { env });
    assert(!existsSync(join(loopDir(scratch, "night"), "loop.json")));
  },
});

Deno.test({
  name: "of loops that pause at once each has its line commented out",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    const { env } = fakes;
    const names = ["a", "b", "c", "d"];
    for (const name of names) {
      writeLoop(scratch, name, {});
      await accept(scratch, [`--install-schedule=${name}`], { env });
    }
    fakes.tell("crontab", '[ "$1" = -l ] || sleep 0.1');
    await Promise.all(names.map((name) => accept(scratch, [`--pause-loop=${name}`], { env })));
    const rows = readTable(fakes).split("\n").filter((line) => line.includes("automaton-loop"));
    assertEquals(rows.map((line) => line[0]), ["#", "#", "#", "#"]);
  },
});

Deno.test({
  name: "a loop of the same name in another project, or in a copy of it, keeps its own line",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    const { env } = fakes;
    await install(scratch, fakes);
    const copy = join(scratch.dir, "copy");
    copySync(scratch.project, copy);
    const inCopy = (...args: string[]) => accept(scratch, [...args, `--project=${copy}`], { env });
    await inCopy("--pause-loop=night");
    assertEquals(ownLines(fakes).map((line) => line[0]), ["0"], "the copy has no schedule yet");
    await inCopy("--resume-loop=night");
    await inCopy("--install-schedule=night");
    assertEquals(ownLines(fakes).length, 2);
    await inCopy("--pause-loop=night");
    assertEquals(ownLines(fakes).map((line) => line[0]), ["0", "#"]);
    await accept(scratch, ["--uninstall-schedule=night"], { env });
    assertEquals(ownLines(fakes).length, 1);
    await inCopy("--uninstall-schedule=night");
    assertEquals(readTable(fakes), LATIN1);
  },
});

Deno.test({
  name: "a project that was moved can still take its old line away, or bring it along",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const table = `${LATIN1}# no end`;
    const fakes = prepare(scratch, table);
    const { env } = fakes;
    await install(scratch, fakes);
    const moved = join(scratch.dir, "moved");
    Deno.renameSync(scratch.project, moved);
    Deno.mkdirSync(scratch.project);
    const options = { env, cwd: moved };
    await accept(scratch, ["--install-schedule=night"], options);
    assertEquals(ownLines(fakes).length, 1);
    assertStringIncludes(ownLines(fakes)[0]!, ` '${moved}/`);
    await accept(scratch, ["--uninstall-schedule=night"], options);
    assertEquals(readTable(fakes), table);
  },
});

Deno.test({
  name: "a change of scheduler takes the old one away",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = await scheduleByCron(scratch);
    assertEquals((await install(scratch, fakes)).scheduler, "cron", "what is recorded is kept");
    const told = await install(scratch, fakes, "--scheduler=systemd");
    assertEquals([told.scheduler, readTable(fakes)], ["systemd", LATIN1]);
    await install(scratch, fakes, "--scheduler=cron");
    assertEquals(ownLines(fakes).length, 1);
    assertEquals([...Deno.readDirSync(join(fakes.dir, "enabled"))], []);
  },
});

Deno.test({
  name: "a change of scheduler that fails leaves the old one as it was",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = await scheduleByCron(scratch);
    const dir = loopDir(scratch, "night");
    const seen = () => [readTable(fakes), snapshot(dir, [".state.lock"])];
    const before = seen();
    fakes.tell("systemctl", '[ "$2" != enable ] || exit 1');
    const change = ["--install-schedule=night", "--scheduler=systemd"];
    await refuse(scratch, change, /exit code 1/, { env: fakes.env });
    assertEquals(seen(), before);
    assertEquals(existsSync(join(scratch.home, ".config/systemd/user/timers.target.wants")), false);
  },
});

Deno.test({
  name: "a change of scheduler that is cut short leaves nothing that an uninstallation misses",
  ignore,
  fn: async () => {
    for (const [name, verb] of [["systemctl", "restart"], ["crontab", "-l"]] as const) {
      using scratch = makeScratch();
      const fakes = await scheduleByCron(scratch);
      const { env } = fakes;
      fakes.tell(name, `case "$*" in *${verb}*) kill -9 "$PPID" ;; esac`);
      const change = ["--install-schedule=night", "--scheduler=systemd"];
      assertEquals((await status(scratch, change, { env })).signal, "SIGKILL");
      fakes.tell(name, null);
      await accept(scratch, ["--uninstall-schedule=night"], { env });
      assertUnscheduled(scratch, fakes);
    }
  },
});

Deno.test({
  name: "an old schedule that does not go is told, stays recorded and goes with the new one",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = await scheduleByCron(scratch);
    const { env } = fakes;
    fakes.tell("crontab", "echo denied >&2; exit 1");
    for (const flags of [["--scheduler=systemd"], []]) {
      const told = await install(scratch, fakes, ...flags);
      assertEquals(told.scheduler, "systemd");
      assertMatch(`${told.warnings}`, /the schedule before stays \(cron\): .*denied/);
    }
    const { violations } = await accept(scratch, ["--audit"], { env });
    assertEquals((violations as Json[]).map(({ message }) => message), [
      "loop night has its schedule before in cron yet",
    ]);
    await refuse(scratch, ["--uninstall-schedule=night"], /denied/, { env });
    fakes.tell("crontab", null);
    assertEquals(ownLines(fakes).length, 1);
    await accept(scratch, ["--uninstall-schedule=night"], { env });
    assertUnscheduled(scratch, fakes);
  },
});

Deno.test({
  name: "a loop that goes on without its line is told, and one whose state is lost has it stopped",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    const { env } = fakes;
    await install(scratch, fakes);
    await accept(scratch, ["--pause-loop=night"], { env });
    writeTable(fakes, LATIN1);
    const { code, stderr } = await status(scratch, ["--resume-loop=night"], { env });
    assertEquals(code, 0);
    assertMatch(stderr, /^warning: .*cron does not know it any more; .*--install-schedule night/);
    await install(scratch, fakes);
    for (const name of [".state.loop", ".state.loop.bak"]) {
      Deno.writeTextFileSync(join(loopDir(scratch, "night"), name), "{");
    }
    await refuse(scratch, ["--pause-loop=night"], /it is halted/, { env });
    assertEquals([ownLines(fakes)[0]![0], record(scratch).paused], ["#", true]);
  },
});

Deno.test({
  name: "intervals: the flag, else loop.json; under a minute a scheduler is of no use",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    const { env } = fakes;
    writeLoop(scratch, "night", { schedule: { kind: "cron", interval_seconds: 420 } });
    const told = await install(scratch, fakes);
    assertEquals([told.interval_seconds, told.exact, told.period_seconds], [420, false, 60]);
    const script = Deno.readTextFileSync(`${record(scratch).script}`);
    assertStringIncludes(
      script,
      "AUTOMATON_DUE_INTERVAL_S='420'\nexport AUTOMATON_DUE_PERIOD_S='60'",
    );
    const daemon = /60 s or more hint: loop-runner --mode daemon --loop night --interval 45$/;
    await refuse(scratch, ["--install-schedule=night", "--interval=45"], daemon, { env });
    await misuse(scratch, ["--install-schedule=night", "--interval=1h"], /"--interval": "1h"/, {
      env,
    });
    await misuse(scratch, ["--install-schedule=night", "--interval=2678401"], /"--interval"/, {
      env,
    });
    writeLoop(scratch, "night", { schedule: { interval_seconds: 30 } });
    await refuse(scratch, ["--install-schedule=night"], /every 30 s/, { env });
    writeLoop(scratch, "night", { schedule: { interval_seconds: 2_678_401 } });
    await refuse(scratch, ["--install-schedule=night"], /2678400 s or less/, { env });
  },
});

Deno.test({
  name: "schedulers: an unknown one is a mistake, and others' are only printed",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    const { env } = fakes;
    const line = (name: string, ...args: string[]) => [
      "--install-schedule=night",
      `--scheduler=${name}`,
      ...args,
    ];
    await misuse(scratch, line("systemb"), /did you mean systemd\?/, { env });
    await misuse(scratch, line("kubernetes"), /--dry-run prints/, { env });
    await misuse(scratch, line("github-actions"), /--dry-run prints/, { env });
    const { stdout } = await status(scratch, line("kubernetes", "--dry-run"), { env });
    assertMatch(stdout, /^# .*\napiVersion: batch\/v1$/ms);
    await refuse(
      scratch,
      line("github-actions", "--dry-run", "--interval=240"),
      /every 300 s at most/,
      { env },
    );
  },
});

Deno.test({
  name: "--dry-run prints the unit of each scheduler as it would be, and writes nothing",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    const { env } = fakes;
    const before = snapshot(scratch.dir, ["tmp"]);
    for (
      const [name, start] of [
        ["cron", /^0 \* \* \* \* '/],
        ["systemd", /^# \/.*\.timer\n# Written by/],
        ["launchd", /^<\?xml .*<\/plist>$/s],
        ["schtasks", /^<\?xml .*<\/Task>$/s],
      ] as const
    ) {
      const line = ["--install-schedule=night", `--scheduler=${name}`, "--dry-run"];
      const { code, stdout } = await status(scratch, line, { env });
      assertEquals(code, 0);
      assertMatch(stdout.trimEnd(), start);
      const told = await accept(scratch, line, { env });
      assertEquals([told.scheduler, told.dry_run], [name, true]);
    }
    assertEquals(snapshot(scratch.dir, ["tmp", "fakes/calls"]), before);
  },
});

Deno.test({
  name: "a path with a control character is refused in one line",
  ignore,
  fn: async () => {
    using scratch = makeScratch("a\nb");
    const fakes = prepare(scratch);
    const words = /Cannot schedule path ".*a\\nb.*control character/;
    await refuse(scratch, ["--install-schedule=night"], words, { env: fakes.env });
  },
});

Deno.test({
  name: "an agent that the schedule would not find is told, and the schedule made all the same",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    const { env } = fakes;
    writeLoop(scratch, "night", {
      roles: { verify: { command: ["{loop_dir}/judge"] } },
      harness: { command: ["no-such-agent"] },
    });
    const { warnings } = await install(scratch, fakes);
    const missing = (warnings as string[]).filter((warning) => /^agent /.test(warning));
    assertEquals(missing.length, 2);
    assertMatch(missing.join(), /"no-such-agent".*"\{loop_dir\}\/judge"/);
    writeScript(join(scratch.bin, "no-such-agent"), "#!/bin/sh\n");
    writeScript(join(loopDir(scratch, "night"), "judge"), "#!/bin/sh\n");
    const again = await install(scratch, fakes);
    assertEquals(again.agent, join(scratch.bin, "no-such-agent"));
    assertEquals((again.warnings as string[]).filter((warning) => /^agent /.test(warning)), []);
    assert(`${again.path}`.startsWith(scratch.bin), "PATH is the one of the installation");
    await accept(scratch, ["--uninstall-schedule=night"], { env });
  },
});

Deno.test({
  name: "what a person's shell sets for the window comes along into the schedule",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    const env = { ...fakes.env, AUTOMATON_CONTEXT_TOKENS: "32768" };
    await accept(scratch, ["--install-schedule=night"], { env });
    assertEquals(record(scratch).context_tokens, "32768");
    const script = Deno.readTextFileSync(`${record(scratch).script}`);
    assertStringIncludes(script, "export AUTOMATON_CONTEXT_TOKENS='32768'\n");
  },
});

Deno.test({
  name: "the audit misses a schedule that is recorded and gone, and none where none was made",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    const { env } = fakes;
    const findings = async () => {
      const { violations } = await accept(scratch, ["--audit"], { env });
      return (violations as Json[]).map(({ category, severity, loop, message }) => [
        category,
        severity,
        loop,
        message,
      ]);
    };
    assertEquals(await findings(), []);
    await install(scratch, fakes);
    assertEquals(await findings(), []);
    writeTable(fakes, LATIN1);
    const message = "loop night has no schedule: cron does not know night any more";
    assertEquals(await findings(), [[6, "low", "night", message]]);
    fakes.tell("crontab", "exit 1");
    assertEquals(await findings(), [], "a crontab that cannot be read says nothing");
  },
});

Deno.test({
  name: "a record that is damaged, or of a newer edition, is told and not written over",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = prepare(scratch);
    const { env } = fakes;
    await install(scratch, fakes);
    const path = join(loopDir(scratch, "night"), "schedule.json");
    const good = record(scratch);
    const hint = "hint: remove .*schedule\\.json, then status --install-schedule night";
    for (
      const [text, words] of [
        ["{", `Cannot parse ".*schedule\\.json".* ${hint}`],
        [JSON.stringify({ ...good, scheduler: "at" }), `field scheduler.* ${hint}`],
        [JSON.stringify({ ...good, replaces: { ...good, unit: 1 } }), `field unit.* ${hint}`],
        [JSON.stringify({ ...good, schema_version: 2 }), "newer than 1"],
      ] as const
    ) {
      Deno.writeTextFileSync(path, text);
      await refuse(scratch, ["--install-schedule=night"], new RegExp(words), { env });
      await refuse(scratch, ["--uninstall-schedule=night"], new RegExp(words), { env });
      const list = await status(scratch, ["--loop-list"], { env });
      assertEquals([list.code, list.stderr.match(/schedule\.json/g)?.length], [0, 1]);
      const { violations } = await accept(scratch, ["--audit"], { env });
      const [{ category, loop, message }, ...more] = violations as [Json];
      assertEquals([category, loop, more], [6, "night", []]);
      assertMatch(`${message}`, /^loop night has a broken schedule: Cannot .*schedule\.json/);
      assertEquals((await status(scratch, ["--audit"], { env })).stderr.match(/warning/), null);
      await accept(scratch, ["--pause-loop=night"], { env });
      await accept(scratch, ["--resume-loop=night"], { env });
      assertEquals(Deno.readTextFileSync(path), text);
    }
  },
});

Deno.test({
  name: "logs of a schedule stay with the loop's own, or go with them",
  ignore,
  fn: async () => {
    for (const [flags, kept] of [[[], true], [["--purge"], false]] as const) {
      using scratch = makeScratch();
      const fakes = prepare(scratch);
      await install(scratch, fakes);
      const log = join(loopDir(scratch, "night"), "schedule.log");
      Deno.writeTextFileSync(log, "a tick\n");
      await accept(scratch, ["--remove-loop=night", ...flags], { env: fakes.env });
      assertEquals(existsSync(log), kept);
    }
  },
});
