/** status and the schedulers of systemd, macOS and Windows, with stand-ins that answer as those do. */
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
  writeFile,
  writeLoop,
} from "./helpers.ts";
import { type Fakes, makeFakes } from "./schedule_support.ts";
import { accept, type Json, refuse, status } from "./status_support.ts";

const ignore = Deno.build.os === "windows";
const UID = Deno.build.os === "windows" ? 0 : Deno.uid();

/** A machine with one scheduler and a loop. */
interface Machine {
  readonly scratch: Scratch;
  readonly fakes: Fakes;
  readonly env: Readonly<Record<string, string>>;
  readonly run: (...args: string[]) => Promise<Json>;
}

function makeMachine(scratch: Scratch, platform: string, ...names: readonly string[]): Machine {
  const fakes = makeFakes(scratch, ...names);
  const env = { ...fakes.env, AUTOMATON_PLATFORM: platform };
  writeLoop(scratch, "night", { harness: { command: ["sh"] } });
  return { scratch, fakes, env, run: (...args) => accept(scratch, args, { env }) };
}

const record = ({ scratch }: Machine): Json =>
  readJson(join(loopDir(scratch, "night"), "schedule.json"));

/** The verbs with which a stand-in was called. */
const verbs = (fakes: Fakes): string[] => fakes.takeCalls().map((call) => call.split(" ")[1]!);

const unitPath = ({ home }: Scratch, name: string): string =>
  join(home, ".config", "systemd", "user", name);
const enabled = ({ dir }: Fakes): string[] => {
  const path = join(dir, "enabled");
  return existsSync(path) ? [...Deno.readDirSync(path)].map(({ name }) => name).sort() : [];
};

Deno.test({
  name: "a systemd timer lives and ends with its loop",
  ignore,
  fn: async (t) => {
    using scratch = makeScratch(`it's 100% "x" $y`);
    const machine = makeMachine(scratch, "linux", "systemctl");
    const { fakes, run } = machine;
    const timer = unitPath(scratch, "automaton-loop-night.timer");
    const service = unitPath(scratch, "automaton-loop-night.service");
    await t.step("installed, in preference to cron", async () => {
      const told = await run("--install-schedule=night", "--interval=2700");
      assertEquals([told.scheduler, told.unit], ["systemd", "automaton-loop-night"]);
      assertEquals(told.files, [timer, service]);
      assertStringIncludes(Deno.readTextFileSync(timer), "OnCalendar=00/3:00,45:00\n");
      assertStringIncludes(Deno.readTextFileSync(service), '100%% \\"x\\" $$y/');
      assertEquals(enabled(fakes), ["automaton-loop-night.timer"]);
      const calls = fakes.takeCalls().join("\n");
      assertMatch(
        calls,
        /show-environment\n.*daemon-reload\n.* enable .*\n.* restart .*\n.*is-active/,
      );
    });
    await t.step("again: the same", async () => {
      const before = snapshot(scratch.home);
      await run("--install-schedule=night", "--interval=2700");
      assertEquals(snapshot(scratch.home), before);
    });
    await t.step("paused, resumed, halted, approved", async () => {
      for (
        const [args, isOn] of [
          [["--pause-loop=night"], false],
          [["--resume-loop=night"], true],
          [["--halt-loop=night", "--reason=drift_detected"], false],
          [["--approve", "--loop=night"], true],
        ] as const
      ) {
        await run(...args);
        assertEquals(enabled(fakes).length === 1, isOn, args.join(" "));
        assertEquals(record(machine).paused, !isOn);
      }
    });
    await t.step("paused while a tick runs: the tick is left alone", async () => {
      using _lock = holdLock(join(loopDir(scratch, "night"), ".state.lock"), { pid: 1 });
      fakes.takeCalls();
      await run("--pause-loop=night");
      assertEquals(fakes.takeCalls(), [
        "systemctl --user disable --now automaton-loop-night.timer",
      ]);
    });
    await t.step("gone", async () => {
      await run("--uninstall-schedule=night");
      assertEquals([existsSync(timer), existsSync(service), enabled(fakes)], [false, false, []]);
      assert(!existsSync(join(loopDir(scratch, "night"), "automaton-loop-tick.sh")));
    });
  },
});

Deno.test({
  name: "systemd's own folder is used where a person has moved it",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { fakes, run } = makeMachine(scratch, "linux", "systemctl");
    const config = join(scratch.dir, "config");
    fakes.tell(
      "systemctl",
      `UNIT_DIR=${config}/systemd/user
[ "$2" != show-environment ] || { echo XDG_CONFIG_HOME=${config}; exit; }`,
    );
    const { files } = await run("--install-schedule=night");
    assertEquals((files as string[])[0], join(config, "systemd/user/automaton-loop-night.timer"));
    await run("--uninstall-schedule=night");
    assertEquals([...Deno.readDirSync(join(config, "systemd/user"))], []);
  },
});

Deno.test({
  name: "without a session of systemd cron is used, and asking for systemd is refused in its words",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { fakes, env, run } = makeMachine(scratch, "linux", "systemctl", "crontab");
    fakes.tell("systemctl", 'echo "Failed to connect to bus: No medium found" >&2; exit 1');
    assertEquals((await run("--install-schedule=night")).scheduler, "cron");
    await run("--uninstall-schedule=night");
    const asked = ["--install-schedule=night", "--scheduler=systemd"];
    await refuse(scratch, asked, /No medium found/, { env });
    assertEquals(existsSync(unitPath(scratch, "automaton-loop-night.timer")), false);
    assertEquals(existsSync(join(loopDir(scratch, "night"), "schedule.json")), false);
  },
});

Deno.test({
  name: "a unit's name that another project has taken gets a mark of its own",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { fakes, run } = makeMachine(scratch, "linux", "systemctl");
    const other = unitPath(scratch, "automaton-loop-night.service");
    writeFile(other, '[Service]\nExecStart=/bin/sh "/other/automaton-loop-tick.sh"\n');
    const { unit } = await run("--install-schedule=night");
    assertMatch(`${unit}`, /^automaton-loop-night-[0-9a-f]{8}$/);
    assertEquals((await run("--install-schedule=night")).unit, unit);
    assertEquals(enabled(fakes), [`${unit}.timer`]);
    await run("--uninstall-schedule=night");
    assertEquals([existsSync(other), enabled(fakes)], [true, []]);
  },
});

Deno.test({
  name: "a timer that is not active after all is no success, and leaves nothing",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { fakes, env } = makeMachine(scratch, "linux", "systemctl");
    for (const verb of ["daemon-reload", "enable", "restart", "is-active"]) {
      fakes.tell("systemctl", `[ "$2" != ${verb} ] || { echo "no ${verb}" >&2; exit 3; }`);
      await refuse(scratch, ["--install-schedule=night"], new RegExp(`: no ${verb}`), { env });
      assertEquals(existsSync(join(loopDir(scratch, "night"), "schedule.json")), false);
      assertEquals([...Deno.readDirSync(unitPath(scratch, "."))], []);
      assertEquals(enabled(fakes), []);
    }
  },
});

Deno.test({
  name: "what an installation that failed cannot take back stays recorded, and goes later",
  ignore,
  fn: async (t) => {
    const cases = [
      ["linux", "systemctl", '[ "$2" != restart ] && [ "$2" != disable ] || exit 1'],
      ["windows", "schtasks", '[ "$1 $4" != "/query " ] && [ "$1" != /delete ] || exit 1'],
    ] as const;
    for (const [platform, name, script] of cases) {
      await t.step(name, async () => {
        using scratch = makeScratch();
        const machine = makeMachine(scratch, platform, name);
        const { fakes, env, run } = machine;
        fakes.tell(name, script);
        const { code, stderr } = await status(scratch, ["--install-schedule=night"], { env });
        assertEquals(code, 1);
        assertMatch(
          stderr,
          /^warning: .* may still have .*--uninstall-schedule night tries again$/m,
        );
        assertMatch(`${record(machine).unit}`, /night$/);
        fakes.tell(name, null);
        assertEquals((await run("--uninstall-schedule=night")).removed, true);
        const left = [
          ...Deno.readDirSync(join(fakes.dir, name === "schtasks" ? "tasks" : "enabled")),
        ];
        assertEquals(left, []);
        assert(!existsSync(join(loopDir(scratch, "night"), "automaton-loop-tick.sh")));
      });
    }
  },
});

Deno.test({
  name: "a task that Windows made and does not show is taken away again",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { fakes, env } = makeMachine(scratch, "windows", "schtasks");
    fakes.tell("schtasks", '[ "$1" != /query ] || exit 1');
    await refuse(scratch, ["--install-schedule=night"], /exit code 1/, { env });
    assertEquals([...Deno.readDirSync(join(fakes.dir, "tasks"))], []);
    assert(!existsSync(join(loopDir(scratch, "night"), "schedule.json")));
  },
});

Deno.test({
  name: "units whose change fails are as they were, and so is what the scheduler does",
  ignore,
  fn: async (t) => {
    await t.step("systemd", async () => {
      using scratch = makeScratch();
      const machine = makeMachine(scratch, "linux", "systemctl");
      const { fakes, env, run } = machine;
      await run("--install-schedule=night", "--interval=3600");
      const [units, before] = [snapshot(scratch.home), record(machine)];
      for (const verb of ["daemon-reload", "is-active"]) {
        fakes.tell("systemctl", `[ "$2" != ${verb} ] || exit 1`);
        const change = ["--install-schedule=night", "--interval=900"];
        await refuse(scratch, change, /exit code 1/, { env });
        assertEquals([snapshot(scratch.home), record(machine)], [units, before], verb);
      }
      fakes.tell("systemctl", null);
      await run("--pause-loop=night");
      fakes.tell("systemctl", '[ "$2" != is-active ] || exit 1');
      await refuse(scratch, ["--install-schedule=night"], /exit code 1/, { env });
      assertEquals([enabled(fakes), record(machine).paused], [[], true]);
    });
    await t.step("launchd", async () => {
      using scratch = makeScratch();
      const machine = makeMac(scratch);
      const { fakes, env, run } = machine;
      await run("--install-schedule=night", "--interval=3600");
      const [units, before] = [snapshot(scratch.home), record(machine)];
      fakes.tell(
        "launchctl",
        '[ "$1" != bootstrap ] || [ -f "$FAKE_DIR/once" ] || { : >"$FAKE_DIR/once"; exit 36; }',
      );
      const change = ["--install-schedule=night", "--interval=900"];
      await refuse(scratch, change, /exit code 36/, { env });
      assertEquals([snapshot(scratch.home), record(machine)], [units, before]);
      assertEquals(readLines(fakes, "loaded"), [SERVICE]);
    });
  },
});

/** A second project with a loop of the same name, and its commands. */
function copyProject({ scratch, run }: Machine): (...args: string[]) => Promise<Json> {
  const other = join(scratch.dir, "other");
  copySync(scratch.project, other);
  return (...args) => run(...args, `--project=${other}`);
}

Deno.test({
  name: "a unit's name that is taken while its loop waits for its lock is not used",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const machine = makeMachine(scratch, "linux", "systemctl");
    const { fakes, run } = machine;
    const inOther = copyProject(machine);
    const lock = holdLock(join(loopDir(scratch, "night"), ".state.lock"));
    const first = run("--install-schedule=night");
    // A command that was started later and waits for nothing is refused: the first one is waiting by now.
    await refuse(scratch, ["--resume-loop=night", "--lock-timeout=0"], /another command/);
    const second = await inOther("--install-schedule=night");
    lock[Symbol.dispose]();
    const units = [`${second.unit}.timer`, `${(await first).unit}.timer`];
    assertEquals(units[0], "automaton-loop-night.timer");
    assertEquals(enabled(fakes), units.sort());
    await run("--uninstall-schedule=night");
    assertEquals(enabled(fakes), ["automaton-loop-night.timer"]);
    await inOther("--uninstall-schedule=night");
    assertEquals(enabled(fakes), []);
  },
});

Deno.test({
  name: "of two loops of one name that are scheduled at once each gets a unit of its own",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const machine = makeMachine(scratch, "windows", "schtasks");
    const inOther = copyProject(machine);
    machine.fakes.tell("schtasks", '[ "$1" != /create ] || sleep 0.5');
    const told = await Promise.all(
      [machine.run, inOther].map((run) => run("--install-schedule=night")),
    );
    const tasks = [...Deno.readDirSync(join(machine.fakes.dir, "tasks"))].map(({ name }) => name);
    assertEquals(tasks.sort(), told.map(({ unit }) => `${unit}`).sort());
  },
});

Deno.test({
  name: "a unit that starts another project's loop is not this loop's, whatever its record says",
  ignore,
  fn: async (t) => {
    const others: readonly (readonly [string, string, (scratch: Scratch) => [string, string]])[] = [
      ["linux", "systemctl", (scratch) => [
        unitPath(scratch, "automaton-loop-night.service"),
        '[Service]\nExecStart=/bin/sh "/other/automaton-loop-tick.sh"\n',
      ]],
      ["darwin", "launchctl", (scratch) => [plistOf(scratch), "<string>/other/tick.sh</string>"]],
      ["windows", "schtasks", ({ dir }) => [
        join(dir, "fakes", "tasks", "AutomatonLoop_night"),
        "<WorkingDirectory>/other</WorkingDirectory>",
      ]],
    ];
    for (const [platform, name, write] of others) {
      await t.step(name, async () => {
        using scratch = makeScratch();
        const { fakes, run } = makeMachine(scratch, platform, name);
        await run("--install-schedule=night");
        const [path, text] = write(scratch);
        writeFile(path, text);
        fakes.tell(
          "schtasks",
          '[ "$1 $4" != "/query /xml" ] || { cat "$FAKE_DIR/tasks/$3"; exit; }',
        );
        const { violations } = await run("--audit");
        assertMatch(JSON.stringify(violations), /does not know .*night any more/);
        await run("--uninstall-schedule=night");
        assertEquals(Deno.readTextFileSync(path), text);
      });
    }
  },
});

Deno.test({
  name: "a schedule that cannot be changed stays as it was recorded",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const machine = makeMachine(scratch, "linux", "systemctl");
    const { fakes, env, run } = machine;
    await run("--install-schedule=night", "--interval=420");
    const [before, script] = [record(machine), Deno.readTextFileSync(`${record(machine).script}`)];
    fakes.tell("systemctl", '[ "$2" != enable ] || exit 1');
    await refuse(scratch, ["--install-schedule=night"], /exit code 1/, { env });
    assertEquals([record(machine), Deno.readTextFileSync(`${before.script}`)], [before, script]);
  },
});

Deno.test({
  name: "a timer that stops at logout is told",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { run } = makeMachine(scratch, "linux", "systemctl");
    for (const [answer, isTold] of [["no", true], ["yes", false]] as const) {
      writeFile(join(scratch.bin, "loginctl"), `#!/bin/sh\necho ${answer}\n`);
      Deno.chmodSync(join(scratch.bin, "loginctl"), 0o755);
      const { warnings } = await run("--install-schedule=night");
      assertEquals(/lingering is off/.test(`${warnings}`), isTold);
    }
  },
});

const SERVICE = `gui/${UID}/com.automaton.loop.night`;
const plistOf = ({ home }: Scratch): string =>
  join(home, "Library", "LaunchAgents", "com.automaton.loop.night.plist");

function readLines({ dir }: Fakes, name: string): string[] {
  const path = join(dir, name);
  return existsSync(path) ? Deno.readTextFileSync(path).split("\n").filter(Boolean) : [];
}

function makeMac(scratch: Scratch, { gui = true } = {}): Machine {
  const machine = makeMachine(scratch, "darwin", "launchctl");
  if (gui) writeFile(join(machine.fakes.dir, "gui"), "");
  return machine;
}

Deno.test({
  name: "a launchd agent lives and ends with its loop",
  ignore,
  fn: async (t) => {
    using scratch = makeScratch(`it's 100% "x" <&>`);
    const machine = makeMac(scratch);
    const { fakes, run } = machine;
    const plist = plistOf(scratch);
    await t.step("installed: enabled, loaded and read back", async () => {
      const told = await run("--install-schedule=night", "--interval=5400");
      assertEquals([told.scheduler, told.domain], ["launchd", `gui/${UID}`]);
      assertEquals(readLines(fakes, "loaded"), [SERVICE]);
      assert(!Deno.readTextFileSync(plist).includes("LimitLoadToSessionType"));
    });
    await t.step("again, while the one before is still being unloaded", async () => {
      writeFile(join(fakes.dir, "lag"), "3\n");
      fakes.takeCalls();
      await run("--install-schedule=night", "--interval=5400");
      assertEquals(readLines(fakes, "loaded"), [SERVICE]);
      const called = verbs(fakes);
      assert(called.indexOf("enable") > called.indexOf("bootout"));
      assert(called.filter((verb) => verb === "print").length >= 5, called.join());
      Deno.removeSync(join(fakes.dir, "lag"));
    });
    await t.step("paused: unloaded, disabled, put aside", async () => {
      await run("--pause-loop=night");
      assertEquals(readLines(fakes, "loaded"), []);
      assertEquals(readLines(fakes, "disabled"), [SERVICE]);
      assertEquals([existsSync(plist), existsSync(`${plist}.disabled`)], [false, true]);
    });
    await t.step("resumed: the label is enabled again", async () => {
      await run("--resume-loop=night");
      assertEquals([readLines(fakes, "loaded"), readLines(fakes, "disabled")], [[SERVICE], []]);
      assertEquals([existsSync(plist), existsSync(`${plist}.disabled`)], [true, false]);
    });
    await t.step("paused while a tick runs: bootout would end it", async () => {
      using _lock = holdLock(join(loopDir(scratch, "night"), ".state.lock"), { pid: 1 });
      fakes.takeCalls();
      await run("--pause-loop=night");
      assertEquals(verbs(fakes), ["disable"]);
      assertEquals(readLines(fakes, "loaded"), [SERVICE]);
    });
    await t.step("resumed after that: loaded anew", async () => {
      await run("--resume-loop=night");
      assertEquals([readLines(fakes, "loaded"), existsSync(plist)], [[SERVICE], true]);
    });
    await t.step("halted by the tick itself: bootout would end it", async () => {
      const env = { ...machine.env, AUTOMATON_NO_LOOP_LOCK: "1", AUTOMATON_LOOP: "night" };
      fakes.takeCalls();
      await accept(scratch, ["--halt-loop=night", "--reason=drift_detected"], { env });
      assertEquals(verbs(fakes), ["disable"]);
      await run("--approve", "--loop=night");
      assertEquals(readLines(fakes, "loaded"), [SERVICE]);
    });
    await t.step("gone, also from a pause", async () => {
      await run("--pause-loop=night");
      await run("--uninstall-schedule=night");
      assertEquals([readLines(fakes, "loaded"), readLines(fakes, "disabled")], [[], []]);
      assertEquals([...Deno.readDirSync(join(scratch.home, "Library", "LaunchAgents"))], []);
    });
  },
});

Deno.test({
  name: "without a graphical session an agent belongs to the background's",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const machine = makeMac(scratch, { gui: false });
    const { domain } = await machine.run("--install-schedule=night");
    assertEquals(domain, `user/${UID}`);
    assertStringIncludes(Deno.readTextFileSync(plistOf(scratch)), "LimitLoadToSessionType");
    assertEquals(readLines(machine.fakes, "loaded"), [`user/${UID}/com.automaton.loop.night`]);
  },
});

Deno.test({
  name: "an agent follows its person from one session to another, and goes from there",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const machine = makeMac(scratch);
    const { fakes, run } = machine;
    await run("--install-schedule=night");
    const before = Deno.readTextFileSync(plistOf(scratch));
    const inBackground = `user/${UID}/com.automaton.loop.night`;
    await run("--pause-loop=night");
    Deno.removeSync(join(fakes.dir, "gui"));
    await run("--resume-loop=night");
    assertEquals([readLines(fakes, "loaded"), record(machine).domain], [
      [inBackground],
      `user/${UID}`,
    ]);
    assertStringIncludes(Deno.readTextFileSync(plistOf(scratch)), "LimitLoadToSessionType");
    await run("--pause-loop=night");
    assertEquals(readLines(fakes, "loaded"), []);
    assertEquals(readLines(fakes, "disabled"), [inBackground]);
    writeFile(join(fakes.dir, "gui"), "");
    await run("--resume-loop=night");
    assertEquals([readLines(fakes, "loaded"), readLines(fakes, "disabled")], [[SERVICE], []]);
    assertEquals(Deno.readTextFileSync(plistOf(scratch)), before);
    Deno.removeSync(join(fakes.dir, "gui"));
    await run("--resume-loop=night");
    await run("--uninstall-schedule=night");
    assertEquals([readLines(fakes, "loaded"), existsSync(plistOf(scratch))], [[], false]);
  },
});

Deno.test({
  name: "a label that was once disabled is enabled first",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { fakes, run } = makeMac(scratch);
    writeFile(join(fakes.dir, "disabled"), `${SERVICE}\n`);
    await run("--install-schedule=night");
    assertEquals(readLines(fakes, "loaded"), [SERVICE]);
  },
});

Deno.test({
  name: "an agent that cannot be loaded is told in launchd's words, and leaves nothing",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { fakes, env } = makeMac(scratch);
    for (
      const [script, words] of [
        [
          '[ "$1" != bootstrap ] || { echo "Bootstrap failed: 125: Domain does not support specified action" >&2; exit 125; }',
          /125: Domain does not support/,
        ],
        ['[ "$1" != bootstrap ] || exit 0', /Cannot load ".*night\.plist"/],
      ] as const
    ) {
      fakes.tell("launchctl", script);
      await refuse(scratch, ["--install-schedule=night"], words, { env });
      assertEquals(existsSync(plistOf(scratch)), false);
      assertEquals(existsSync(join(loopDir(scratch, "night"), "schedule.json")), false);
    }
  },
});

Deno.test({
  name: "an agent that does not go is still recorded",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const machine = makeMac(scratch);
    const { fakes, env, run } = machine;
    await run("--install-schedule=night");
    fakes.tell("launchctl", '[ "$1" != bootout ] || exit 36');
    await refuse(scratch, ["--uninstall-schedule=night"], /still loaded hint: launchctl bootout/, {
      env,
    });
    assertEquals(record(machine).unit, "com.automaton.loop.night");
    assert(existsSync(plistOf(scratch)));
  },
});

Deno.test({
  name: "a project where macOS asks before a job may read is told",
  ignore,
  fn: async () => {
    using scratch = makeScratch("home/Documents/work");
    const { warnings } = await makeMac(scratch).run("--install-schedule=night");
    assertMatch(`${warnings}`, /macOS asks before a background job may read .*Documents/);
  },
});

Deno.test({
  name: "a task of Windows lives and ends with its loop, whatever language Windows speaks",
  ignore,
  fn: async (t) => {
    using scratch = makeScratch("it's é <&>");
    const machine = makeMachine(scratch, "windows", "schtasks");
    const { fakes, run } = machine;
    const task = join(fakes.dir, "tasks", "AutomatonLoop_night");
    await t.step("installed: rounded up to minutes, read back", async () => {
      const told = await run("--install-schedule=night", "--interval=90");
      assertEquals([told.scheduler, told.unit], ["schtasks", "AutomatonLoop_night"]);
      assertEquals([told.interval_seconds, told.exact, told.period_seconds], [90, true, 120]);
      const bytes = Deno.readFileSync(task);
      assertEquals([bytes[0], bytes[1]], [0xff, 0xfe]);
      assertStringIncludes(new TextDecoder("utf-16le").decode(bytes), "<Interval>PT2M</Interval>");
      const folder = [...Deno.readDirSync(loopDir(scratch, "night"))].map(({ name }) => name);
      assertEquals(folder.filter((name) => /xml|\.sh$/.test(name)), []);
    });
    await t.step("again: the same task", async () => {
      assertEquals((await run("--install-schedule=night")).unit, "AutomatonLoop_night");
      assertEquals([...Deno.readDirSync(join(fakes.dir, "tasks"))].length, 1);
    });
    await t.step("paused, resumed, halted, approved", async () => {
      for (
        const [args, isOn] of [
          [["--pause-loop=night"], false],
          [["--resume-loop=night"], true],
          [["--halt-loop=night", "--reason=drift_detected"], false],
          [["--approve", "--loop=night"], true],
        ] as const
      ) {
        await run(...args);
        assertEquals(!existsSync(`${task}.disabled`), isOn, args.join(" "));
      }
    });
    await t.step("gone", async () => {
      await run("--uninstall-schedule=night");
      assert(!existsSync(task));
    });
    await t.step("gone by another's hand: no complaint", async () => {
      await run("--install-schedule=night");
      Deno.removeSync(task);
      const { violations } = await run("--audit");
      assertMatch(JSON.stringify(violations), /schtasks does not know AutomatonLoop_night/);
      await run("--uninstall-schedule=night");
    });
  },
});

Deno.test({
  name: "a task's name that another project has taken gets a mark of its own",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { fakes, run } = makeMachine(scratch, "windows", "schtasks");
    writeFile(join(fakes.dir, "tasks", "AutomatonLoop_night"), "<Task>another's</Task>");
    fakes.tell(
      "schtasks",
      '[ "$1 $3 $4" != "/query AutomatonLoop_night /xml" ] || { cat "$FAKE_DIR/tasks/$3"; exit; }',
    );
    const { unit } = await run("--install-schedule=night");
    assertMatch(`${unit}`, /^AutomatonLoop_night-[0-9a-f]{8}$/);
  },
});

Deno.test({
  name: "a task that Windows does not take is told by its exit code, and leaves nothing",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { fakes, env, run } = makeMachine(scratch, "windows", "schtasks");
    fakes.tell(
      "schtasks",
      '[ "$1" != /create ] || { echo "FEHLER: Zugriff verweigert" >&2; exit 1; }',
    );
    await refuse(scratch, ["--install-schedule=night"], /exit code 1: FEHLER: Zugriff/, { env });
    assertEquals(existsSync(join(loopDir(scratch, "night"), "schedule.json")), false);
    fakes.tell("schtasks", null);
    await run("--install-schedule=night");
    fakes.tell("schtasks", '[ "$1" != /change ] || exit 1');
    const { code, stderr } = await status(scratch, ["--pause-loop=night"], { env });
    assertEquals(code, 0);
    assertMatch(stderr, /warning: Cannot pause the schedule: .*exit code 1/);
    assertEquals(readLog(scratch, "night").at(-1)?.event, "WARNING");
  },
});

Deno.test({
  name: "where a scheduler's program is missing, that is what is told",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const bin = join(scratch.dir, "only");
    Deno.mkdirSync(bin);
    writeLoop(scratch, "night");
    for (
      const [platform, words] of [
        ["darwin", /launchctl is not installed/],
        ["windows", /schtasks is not installed/],
      ] as const
    ) {
      const env = { PATH: bin, AUTOMATON_PLATFORM: platform };
      await refuse(scratch, ["--install-schedule=night"], words, { env });
    }
  },
});
