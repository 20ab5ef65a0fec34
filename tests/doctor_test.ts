/** status --doctor: what a machine, its scheduler and its loops lack. */
import { assert, assertEquals, assertMatch } from "@std/assert";
import { join } from "@std/path";
import {
  lastJson,
  loopDir,
  makeScratch,
  readJson,
  ROOT,
  run,
  type Scratch,
  snapshot,
  writeFile,
  writeLoop,
  writeScript,
} from "./helpers.ts";
import { copyCheckout, IS_ROOT } from "./install_support.ts";
import { makeFakes } from "./schedule_support.ts";
import { accept, type Json, status } from "./status_support.ts";

const ignore = Deno.build.os === "windows";

interface Diagnosis {
  readonly code: number;
  readonly ok: unknown;
  readonly checks: readonly Json[];
  readonly all: string;
}

/** Runs the doctor; its exit code must agree with its words. */
async function diagnose(
  scratch: Scratch,
  env: Readonly<Record<string, string | undefined>> = {},
  ...args: string[]
): Promise<Diagnosis> {
  const result = await status(scratch, ["--doctor", "--json", ...args], { env });
  const { ok, checks, schema_version } = lastJson(result);
  assertEquals(schema_version, 1);
  const lines = checks as Json[];
  for (const { name, status: word, message, hint } of lines) {
    assert(["ok", "warning", "failure"].includes(`${word}`), `${word}`);
    assertEquals(hint === null, word === "ok", `${name}: ${message}`);
  }
  const hasFailed = lines.some((line) => line.status === "failure");
  assertEquals([ok, result.code], hasFailed ? [false, 1] : [true, 0], result.stdout);
  return { code: result.code, ok, checks: lines, all: JSON.stringify(lines, null, 1) };
}

/** The lines of one name, as status and message. */
const told = ({ checks }: Diagnosis, name: string): string[] =>
  checks.filter((line) => line.name === name).map((line) => `${line.status}: ${line.message}`);

/** Lets the processes of this machine be called as a test wants. */
function nameProcesses(scratch: Scratch, ...names: readonly string[]): void {
  writeScript(
    join(scratch.bin, "cat"),
    `#!/bin/sh\ncase $1 in /proc/*) printf '%s\\n' ${
      names.join(" ")
    } ;; *) exec /bin/cat "$@" ;; esac\n`,
  );
}

Deno.test({
  name: "a healthy machine: every line is ok, in words and as JSON, and nothing is left behind",
  ignore: ignore || Deno.build.os !== "linux",
  fn: async () => {
    using scratch = makeScratch();
    const fakes = makeFakes(scratch, "crontab");
    writeLoop(scratch, "night", { harness: { command: ["sh"] } });
    const env = { ...fakes.env, AUTOMATON_CONTEXT_TOKENS: "32768" };
    await accept(scratch, ["--install-schedule=night"], { env });
    nameProcesses(scratch, "init", "crond");
    const before = snapshot(scratch.project);
    const found = await diagnose(scratch, env);
    assertEquals(found.checks.filter((line) => line.status !== "ok"), [], found.all);
    assertEquals(found.checks.map(({ name }) => name), [
      "deno",
      "git",
      "program loop-runner",
      "program status",
      "program vram-detect",
      "scheduler",
      "loop night",
      "loop night",
      "context window",
      "write access",
      "clock",
      "disk space",
    ]);
    assertMatch(told(found, "deno")[0]!, /^ok: \d+\.\d+\.\d+ \(.*\), @std /);
    assertMatch(told(found, "git")[0]!, /^ok: \d+\.\d+/);
    assertEquals(told(found, "scheduler"), ["ok: cron, and its daemon runs"]);
    assertEquals(told(found, "loop night"), [
      "ok: running, every 1 h (cron)",
      "ok: agent /usr/bin/sh",
    ]);
    assertMatch(told(found, "context window")[0]!, /^ok: 32768 tokens \(env\), floor 16000$/);
    assertMatch(told(found, "clock")[0]!, /^ok: \d{4}-\d\d-\d\d \d\d:\d\d [+-]\d\d:\d\d$/);
    const { stdout, code } = await status(scratch, ["--doctor"], { env });
    assertEquals(code, 0);
    assertEquals(stdout.trimEnd().split("\n").length, found.checks.length);
    assertMatch(stdout, /^ok +deno +/);
    assertEquals(snapshot(scratch.project), before);
  },
});

Deno.test({
  name: "no cron process: a failure for a loop that waits for it, else a warning",
  ignore: ignore || Deno.build.os !== "linux",
  fn: async () => {
    using scratch = makeScratch();
    const { env } = makeFakes(scratch, "crontab");
    writeLoop(scratch, "night", { harness: { command: ["sh"] } });
    nameProcesses(scratch, "init", "acron", "sh");
    const words = "cron, but no cron process runs: nothing will fire";
    assertEquals(told(await diagnose(scratch, env), "scheduler"), [`warning: ${words}`]);
    const { warnings } = await accept(scratch, ["--install-schedule=night"], { env });
    assertMatch(`${warnings}`, /no cron process runs/);
    assertEquals(told(await diagnose(scratch, env), "scheduler"), [`failure: ${words}`]);
    await accept(scratch, ["--pause-loop=night"], { env });
    assertEquals(told(await diagnose(scratch, env), "scheduler"), [`warning: ${words}`]);
  },
});

Deno.test({
  name: "no scheduler, a crontab that is denied, a session without a bus: told in their words",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = makeFakes(scratch, "crontab", "systemctl");
    const { env } = fakes;
    fakes.tell("systemctl", 'echo "Failed to connect to bus: No medium found" >&2; exit 1');
    fakes.tell("crontab", 'echo "You (alice) are not allowed to use this program" >&2; exit 1');
    const [line] = told(await diagnose(scratch, env), "scheduler");
    assertMatch(`${line}`, /^warning: .*No medium found.*You \(alice\) are not allowed/);
    fakes.tell("systemctl", null);
    writeLoop(scratch, "night");
    await accept(scratch, ["--install-schedule=night"], { env });
    fakes.tell("systemctl", 'echo "Failed to connect to bus: No medium found" >&2; exit 1');
    const [now] = told(await diagnose(scratch, env), "scheduler");
    assertMatch(`${now}`, /^failure: systemd: .*No medium found/);
  },
});

Deno.test({
  name: "lingering is looked at where systemd keeps the timers",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { env } = makeFakes(scratch, "systemctl");
    const answer = async (script: string) => {
      writeScript(join(scratch.bin, "loginctl"), `#!/bin/sh\n${script}\n`);
      return told(await diagnose(scratch, env), "lingering");
    };
    assertEquals(await answer("echo no"), ["warning: off: timers stop at logout"]);
    assertEquals(await answer("echo yes"), ["ok: on: timers go on after logout"]);
    assertEquals(await answer("exit 1"), ["warning: cannot be told"]);
  },
});

Deno.test({
  name: "launchd and schtasks are asked whether they answer",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = makeFakes(scratch, "launchctl", "schtasks");
    for (
      const [platform, scheduler, program] of [
        ["darwin", "launchd", "launchctl"],
        ["windows", "schtasks", "schtasks"],
      ] as const
    ) {
      const env = { ...fakes.env, AUTOMATON_PLATFORM: platform };
      assertEquals(told(await diagnose(scratch, env), "scheduler"), [`ok: ${scheduler}`]);
      fakes.tell(program, 'echo "no session" >&2; exit 9');
      const [line] = told(await diagnose(scratch, env), "scheduler");
      assertMatch(`${line}`, new RegExp(`^warning: ${scheduler}: .*exit code 9: no session`));
    }
  },
});

Deno.test({
  name: "an agent is looked for on the PATH that the schedule has, not on today's",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { env } = makeFakes(scratch, "crontab");
    const tools = join(scratch.dir, "tools");
    writeLoop(scratch, "night", { harness: { command: ["my-agent"] } });
    const agent = async (path?: string) => {
      const found = await diagnose(scratch, path === undefined ? env : { ...env, PATH: path });
      return told(found, "loop night").find((line) => line.includes("agent"));
    };
    assertEquals(await agent(), 'warning: agent "my-agent" is not on PATH');
    await accept(scratch, ["--install-schedule=night"], { env });
    writeScript(join(tools, "my-agent"), "#!/bin/sh\n");
    const wider = `${tools}:${scratch.env.PATH}`;
    assertEquals(
      await agent(wider),
      'failure: agent "my-agent" is not on the PATH of its schedule',
    );
    await accept(scratch, ["--install-schedule=night"], { env: { ...env, PATH: wider } });
    assertEquals(await agent(), `ok: agent ${join(tools, "my-agent")}`);
    Deno.chmodSync(join(tools, "my-agent"), 0o644);
    assertMatch(`${await agent()}`, /^failure/);
  },
});

Deno.test({
  name: "a schedule that is gone, disabled, or leads nowhere is a failure",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const fakes = makeFakes(scratch, "crontab");
    const { env } = fakes;
    writeLoop(scratch, "night", { harness: { command: ["sh"] } });
    const line = async () => told(await diagnose(scratch, env), "loop night")[0];
    assertEquals(await line(), "ok: running, no schedule");
    await accept(scratch, ["--install-schedule=night"], { env });
    const table = join(fakes.dir, "table");
    const lines = Deno.readTextFileSync(table);
    Deno.writeTextFileSync(table, `#${lines}`);
    assertEquals(await line(), "failure: running, every 1 h (cron): cron has it disabled");
    Deno.writeTextFileSync(table, "");
    assertEquals(
      await line(),
      "failure: running, every 1 h (cron): cron does not know it any more",
    );
    Deno.writeTextFileSync(table, lines);
    const script = join(loopDir(scratch, "night"), "automaton-loop-tick.sh");
    Deno.renameSync(script, `${script}.away`);
    assertEquals(await line(), `failure: running, every 1 h (cron): ${script} is missing`);
    Deno.renameSync(`${script}.away`, script);
    const path = join(loopDir(scratch, "night"), "schedule.json");
    writeFile(path, JSON.stringify({ ...readJson(path), runner: ["/gone/bin/loop-runner"] }));
    assertMatch(`${await line()}`, /^failure: .*\/gone\/bin\/loop-runner is missing$/);
    await accept(scratch, ["--install-schedule=night"], { env });
    fakes.tell("crontab", "exit 1");
    assertEquals(await line(), "warning: running, every 1 h (cron): cron gives no answer");
  },
});

Deno.test({
  name: "a window below the floor, or unknown, is a failure for a scheduled loop, else a warning",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { env } = makeFakes(scratch, "crontab");
    writeLoop(scratch, "night", { harness: { command: ["sh"] } });
    const window = async (tokens?: string) => {
      const own = { ...env, AUTOMATON_CONTEXT_TOKENS: tokens };
      return told(await diagnose(scratch, own), "context window");
    };
    assertMatch(
      (await window("8000"))[0]!,
      /^warning: 8000 tokens \(env\), below the floor of 16000/,
    );
    assertMatch((await window())[0]!, /^warning: unknown/);
    const install = { env: { ...env, AUTOMATON_CONTEXT_TOKENS: "8000" } };
    await accept(scratch, ["--install-schedule=night"], install);
    assertMatch(
      (await window("32768"))[0]!,
      /^failure: 8000 tokens/,
      "its ticks have what it was installed with",
    );
    writeLoop(scratch, "night", {
      roles: { verify: { model: "judge" } },
      harness: { command: ["sh"] },
    });
    writeFile(
      join(scratch.project, ".automaton", "models.json"),
      JSON.stringify({
        default: "coder",
        models: { coder: { context_tokens: 32768 }, judge: { context_tokens: 9000 } },
      }),
    );
    await accept(scratch, ["--install-schedule=night"], { env });
    const lines = await window();
    assertMatch(lines[0]!, /^ok: 32768 tokens/);
    assertMatch(lines[1]!, /^failure: 9000 tokens of judge/);
  },
});

Deno.test({
  name: "a disk that is nearly full is a warning, one that is full a failure",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { env } = makeFakes(scratch, "crontab");
    const df = async (free: string) => {
      const head = "Filesystem 1024-blocks Used Available Capacity Mounted on";
      const line = `/dev/a b 900000 1 ${free} 99% /a 5 b`;
      writeScript(join(scratch.bin, "df"), `#!/bin/sh\nprintf '%s\\n' "${head}" "${line}"\n`);
      return told(await diagnose(scratch, env), "disk space")[0]!;
    };
    assertMatch(await df("51200"), /^failure: 50 MiB free/);
    assertMatch(await df("512000"), /^warning: 500 MiB free/);
    assertMatch(await df("5120000"), /^ok: 5000 MiB free/);
    writeScript(join(scratch.bin, "df"), "#!/bin/sh\nexit 3\n");
    assertMatch(told(await diagnose(scratch, env), "disk space")[0]!, /^warning: cannot be told/);
  },
});

Deno.test({
  name: "a project that cannot be written is a failure",
  ignore: ignore || IS_ROOT,
  fn: async () => {
    using scratch = makeScratch();
    Deno.chmodSync(join(scratch.project, ".automaton"), 0o555);
    assertMatch(told(await diagnose(scratch), "write access")[0]!, /^failure: /);
  },
});

Deno.test({
  name: "a project that cannot be written is a failure (root: seen by somebody else)",
  ignore: ignore || !IS_ROOT,
  fn: async () => {
    using scratch = makeScratch();
    const framework = copyCheckout(join(scratch.dir, "framework"));
    const script = join(framework, "scripts", "status.ts");
    const deno = join(scratch.dir, "deno");
    Deno.copyFileSync(Deno.execPath(), deno);
    new Deno.Command("chmod", { args: ["-R", "a+rX", scratch.dir] }).outputSync();
    const argv = [deno, "run", "-q", "--no-prompt", "-P=status", script, "--doctor", "--json"];
    const result = await run(scratch, argv, {
      prefix: ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"],
      env: { DENO_DIR: "/nonexistent", HOME: "/nonexistent" },
    });
    const { checks } = lastJson(result);
    const line = (checks as Json[]).find(({ name }) => name === "write access");
    assertEquals([result.code, line?.status], [1, "failure"], result.stdout);
  },
});

Deno.test({
  name: "a clock that is behind the loops' own times is told",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { env } = makeFakes(scratch, "crontab");
    const future = new Date(Date.now() + 86_400_000).toISOString();
    for (const field of ["last_tick_at", "last_slot"]) {
      writeLoop(scratch, "night", { harness: { command: ["sh"] } }, { [field]: future });
      const lines = told(await diagnose(scratch, env), "clock");
      assertEquals(lines, ["warning: loop night last ticked in the future"]);
    }
  },
});

Deno.test({
  name: "a loop that is broken is a failure, whatever else is well",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { env } = makeFakes(scratch, "crontab");
    const dir = writeLoop(scratch, "night", { harness: { command: ["sh"] } });
    writeFile(join(dir, "schedule.json"), "{");
    assertMatch(
      told(await diagnose(scratch, env), "loop night").join(),
      /^failure: .*schedule\.json/,
    );
    Deno.removeSync(join(dir, "schedule.json"));
    writeFile(join(dir, "loop.json"), '{"name": "night", "brakes": 1}');
    assertMatch(told(await diagnose(scratch, env), "loop night")[1]!, /^failure: .*brakes/);
    writeFile(join(dir, ".state.loop"), "{");
    assertMatch(told(await diagnose(scratch, env), "loop night")[0]!, /^failure: /);
  },
});

Deno.test({
  name: "programs are told by their form, and one that does not answer is a failure",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { env } = makeFakes(scratch, "crontab");
    const framework = join(scratch.dir, "framework");
    const version = /^version: (\S+)/m.exec(Deno.readTextFileSync(join(ROOT, "config.md")))![1]!;
    writeFile(join(framework, "config.md"), `version: ${version}\n`);
    for (const name of ["loop-runner", "status", "vram-detect"]) {
      writeScript(join(framework, "bin", name), `#!/bin/sh\necho ${name} ${version}\n`);
    }
    const program = async (name: string) => {
      const found = await diagnose(scratch, { ...env, AUTOMATON_HOME: framework });
      return told(found, `program ${name}`)[0]!;
    };
    assertMatch(await program("status"), /^ok: \S+, launcher \(.*\/bin\/status\)$/);
    writeScript(join(framework, "bin", "status"), "#!/bin/sh\necho status 0.0.0\n");
    assertMatch(await program("status"), /^failure: .*it says "status 0\.0\.0"/);
    writeScript(join(framework, "bin", "status"), "#!/bin/sh\necho broken >&2; exit 127\n");
    assertMatch(await program("status"), /^failure: .*exit code 127: broken/);
    Deno.copyFileSync("/bin/true", join(framework, "bin", "loop-runner"));
    assertMatch(await program("loop-runner"), /^failure: compiled /);
  },
});

Deno.test({
  name: "without git loops go on in the project itself: a warning",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { env } = makeFakes(scratch, "crontab");
    const bin = join(scratch.dir, "only");
    Deno.mkdirSync(bin);
    for (const name of ["sh", "cat", "df"]) Deno.symlinkSync(`/bin/${name}`, join(bin, name));
    const found = await diagnose(scratch, { ...env, PATH: `${scratch.bin}:${bin}` });
    assertMatch(told(found, "git")[0]!, /^warning: git is not installed/);
  },
});

Deno.test({
  name:
    "outside of any project the doctor looks at Automaton's own folder; a named one must be there",
  ignore,
  fn: async () => {
    using scratch = makeScratch();
    const { env } = makeFakes(scratch, "crontab");
    const framework = copyCheckout(join(scratch.dir, "framework"));
    const outside = { env: { ...env, AUTOMATON_HOME: framework }, cwd: scratch.home };
    const result = await status(scratch, ["--doctor", "--json"], outside);
    assertEquals([result.code, lastJson(result).project], [0, framework], result.stdout);
    const named = await status(scratch, ["--doctor", "--project=/no/such"], outside);
    assertEquals(named.code, 1);
    assertMatch(named.stderr, /Cannot open project "\/no\/such"/);
  },
});
