/** What schedulers are given: golden files, and those who read such files for real. */
import { assert, assertEquals, assertMatch, assertThrows } from "@std/assert";
import { join } from "@std/path";
import {
  encodeUtf16,
  planSchedule,
  type PrintedScheduler,
  renderCronJob,
  renderCronLines,
  renderLaunchAgent,
  renderSystemdUnits,
  renderTaskXml,
  renderTickScript,
  renderWorkflow,
  type ScheduleJob,
  type Scheduler,
} from "../scripts/status.ts";
import { fc } from "./deps.ts";
import { makeScratch, ROOT, run, writeFile, writeScript } from "./helpers.ts";
import { isInstalled } from "./install_support.ts";
import { DOMParser, nastyPath, parseYaml } from "./schedule_support.ts";
// deno-lint-ignore-start no-import-prefix -- only here, since they are slow to load
import { CronJob, type ICronJob } from "npm:kubernetes-models@5.1.0/batch/v1/CronJob";
import { validateWorkflow } from "npm:@action-validator/core@0.6.0";
// deno-lint-ignore-end no-import-prefix

const FIXTURES = join(ROOT, "tests", "fixtures", "schedule");
const INTERVALS = [60, 90, 300, 420, 1440, 2700, 3600, 5400, 7200, 17_280, 86_400, 100_000];

/** A job whose every word needs quoting somewhere. */
function makeJob(
  scheduler: Scheduler | PrintedScheduler,
  intervalS: number,
  { project = `/home/it's me/100% "x" $HOME\\n/é<&>`, unit = "night" } = {},
): ScheduleJob {
  const dir = `${project}/.automaton/loops/night`;
  const plan = planSchedule(intervalS, scheduler);
  const due = { AUTOMATON_DUE_INTERVAL_S: "420", AUTOMATON_DUE_PERIOD_S: "60" };
  return {
    loop: "night",
    project,
    plan,
    timeoutS: 86_400,
    path: "/opt/my tools/bin:/usr/bin",
    environment: plan.isExact ? {} : due,
    runner: ["/home/it's me/.automaton/bin/loop-runner"],
    script: `${dir}/automaton-loop-tick.sh`,
    log: `${dir}/schedule.log`,
    unit,
  };
}

/** Compares with a stored file; AUTOMATON_UPDATE_FIXTURES=1 stores instead. */
function assertGolden(name: string, found: Uint8Array): void {
  const path = join(FIXTURES, name);
  if (Deno.env.get("AUTOMATON_UPDATE_FIXTURES") === "1") Deno.writeFileSync(path, found);
  const expected = Deno.readFileSync(path);
  const decode = (bytes: Uint8Array) => new TextDecoder().decode(bytes);
  assertEquals(decode(found), decode(expected));
  assertEquals(found, expected);
}

const utf8 = (text: string): Uint8Array => new TextEncoder().encode(text);
const systemdJob = makeJob("systemd", 2700, { unit: "automaton-loop-night" });
const launchdJob = makeJob("launchd", 5400, { unit: "com.automaton.loop.night" });

const GOLDEN: Readonly<Record<string, () => Uint8Array>> = {
  "crontab.golden": () => utf8(renderCronLines(makeJob("cron", 2700)).join("\n") + "\n"),
  "tick.sh.golden": () => utf8(renderTickScript(makeJob("cron", 420))),
  "night.timer.golden": () => utf8(renderSystemdUnits(systemdJob).timer),
  "night.service.golden": () => utf8(renderSystemdUnits(systemdJob).service),
  "night.plist.golden": () => utf8(renderLaunchAgent(launchdJob, "gui/501")),
  "night-background.plist.golden": () => utf8(renderLaunchAgent(launchdJob, "user/501")),
  "night.xml.golden": () =>
    encodeUtf16(renderTaskXml(makeJob("schtasks", 420, { unit: "AutomatonLoop_night" }))),
  "cronjob.yaml.golden": () => utf8(renderCronJob(makeJob("kubernetes", 420))),
  "workflow.yml.golden": () => utf8(renderWorkflow(makeJob("github-actions", 420))),
};

for (const [name, render] of Object.entries(GOLDEN)) {
  Deno.test(`${name} is what is rendered, byte for byte`, () => assertGolden(name, render()));
}

Deno.test("the task for Windows is UTF-16 with its mark and Windows' ends of lines", () => {
  const bytes = GOLDEN["night.xml.golden"]!();
  assertEquals([...bytes.subarray(0, 4)], [0xff, 0xfe, "<".charCodeAt(0), 0]);
  const text = new TextDecoder("utf-16le").decode(bytes);
  assert(text.startsWith('<?xml version="1.0" encoding="UTF-16"?>\r\n'));
  assert(!/[^\r]\n/.test(text));
});

Deno.test("a task goes on for ever, alone, on batteries, and is made up for", () => {
  const xml = renderTaskXml(makeJob("schtasks", 420));
  const root = new DOMParser().parseFromString(xml, "text/xml").documentElement!;
  const value = (tag: string) => root.getElementsByTagName(tag)[0]?.textContent ?? null;
  const expected = {
    Interval: "PT7M",
    Duration: null,
    MultipleInstancesPolicy: "IgnoreNew",
    DisallowStartIfOnBatteries: "false",
    StopIfGoingOnBatteries: "false",
    StartWhenAvailable: "true",
    ExecutionTimeLimit: "PT86400S",
    Command: "/home/it's me/.automaton/bin/loop-runner",
    WorkingDirectory: `/home/it's me/100% "x" $HOME\\n/é<&>`,
  };
  assertEquals(Object.fromEntries(Object.keys(expected).map((tag) => [tag, value(tag)])), expected);
  const argument = value("Arguments");
  assertEquals(
    argument,
    `--mode tick --loop night --project "/home/it's me/100% \\"x\\" $HOME\\n/é<&>"`,
  );
  const endless = renderTaskXml({ ...makeJob("schtasks", 420), timeoutS: null });
  assert(endless.includes("<ExecutionTimeLimit>PT0S</ExecutionTimeLimit>"));
});

Deno.test({
  name: "systemd-analyze, where installed, finds nothing to say about any timer and service",
  ignore: !isInstalled("systemd-analyze"),
  fn: async () => {
    using scratch = makeScratch();
    const paths = fc.sample(nastyPath, { numRuns: 20, seed: 7 });
    const units = [...INTERVALS, ...paths].map((each, index) => {
      const unit = `automaton-loop-n${index}`;
      const job = typeof each === "number"
        ? makeJob("systemd", each, { unit })
        : makeJob("systemd", 2700, { unit, project: each });
      const { timer, service } = renderSystemdUnits({
        ...job,
        timeoutS: index % 2 ? 90_000 : null,
      });
      const files = [join(scratch.dir, `${unit}.timer`), join(scratch.dir, `${unit}.service`)];
      writeFile(files[0]!, timer);
      writeFile(files[1]!, service);
      return files;
    });
    const argv = ["systemd-analyze", "--user", "verify", ...units.flat()];
    const env = { XDG_RUNTIME_DIR: scratch.dir };
    const { code, stdout, stderr } = await run(scratch, argv, { env });
    assertEquals([code, stdout, stderr], [0, "", ""]);
  },
});

const PLIST_SCRIPT = `
import json, plistlib, sys
print(json.dumps([plistlib.loads(xml.encode()) for xml in json.load(sys.stdin)]))
`;

/** Plists as Python's strict reader has them. */
async function readPlists(xmls: readonly string[]): Promise<Record<string, unknown>[]> {
  const child = new Deno.Command("python3", {
    args: ["-c", PLIST_SCRIPT],
    stdin: "piped",
    stdout: "piped",
    stderr: "piped",
  }).spawn();
  const writer = child.stdin.getWriter();
  await writer.write(utf8(JSON.stringify(xmls)));
  await writer.close();
  const { code, stdout, stderr } = await child.output();
  assertEquals(code, 0, new TextDecoder().decode(stderr));
  return JSON.parse(new TextDecoder().decode(stdout));
}

/** What plistlib does not complain about: a key twice in one dictionary. */
function assertKeysOnce(xml: string): void {
  const root = new DOMParser().parseFromString(xml, "text/xml").documentElement!;
  for (const dictionary of root.getElementsByTagName("dict")) {
    const keys = [...dictionary.childNodes].filter(({ nodeName }) => nodeName === "key")
      .map(({ textContent }) => textContent);
    assertEquals(new Set(keys).size, keys.length, `${keys}`);
  }
}

Deno.test({
  name: "plistlib of python3, where installed, reads every agent with the right types",
  ignore: !isInstalled("python3"),
  fn: async () => {
    const cases = INTERVALS.flatMap((seconds) =>
      ["gui/501", "user/501"].map((domain) => {
        const job = makeJob("launchd", seconds, { unit: "com.automaton.loop.night" });
        return { job, domain, xml: renderLaunchAgent(job, domain) };
      })
    );
    const plists = await readPlists(cases.map(({ xml }) => xml));
    assertEquals(plists.length, cases.length);
    for (const [index, { StartCalendarInterval: times, ...rest }] of plists.entries()) {
      const { job, domain, xml } = cases[index]!;
      assertKeysOnce(xml);
      assertEquals(rest, {
        Label: "com.automaton.loop.night",
        ProgramArguments: [job.script],
        EnvironmentVariables: { PATH: job.path },
        WorkingDirectory: job.project,
        StandardOutPath: job.log,
        StandardErrorPath: job.log,
        ProcessType: "Background",
        ...(domain === "user/501" ? { LimitLoadToSessionType: "Background" } : {}),
      });
      assert(Array.isArray(times) && times.length > 0);
      for (const { Hour, Minute, ...others } of times) {
        assert(Number.isInteger(Minute) && Minute >= 0 && Minute < 60);
        assert(Hour === undefined || (Number.isInteger(Hour) && Hour >= 0 && Hour < 24));
        assertEquals(others, {});
      }
    }
  },
});

Deno.test({
  name: "the script brings its PATH, its variables and its project, whatever they are called",
  ignore: Deno.build.os === "windows",
  fn: async () => {
    using scratch = makeScratch(`it's 100% "x" $HOME \\ é`);
    const runner = join(scratch.dir, "a runner's");
    writeScript(
      runner,
      `#!/bin/sh\nprintf '%s\\n' "$PWD" "$PATH" "$AUTOMATON_DUE_INTERVAL_S" "$@"\n`,
    );
    const job = { ...makeJob("cron", 420, { project: scratch.project }), runner: [runner, "-q"] };
    const script = join(scratch.dir, "tick.sh");
    const read = async (env: Record<string, string>, path = job.path): Promise<string[]> => {
      writeScript(script, renderTickScript({ ...job, path }));
      const result = await run(scratch, [script], { cwd: "/", env });
      assertEquals([result.code, result.stderr], [0, ""]);
      return result.stdout.trimEnd().split("\n");
    };
    const words = ["-q", "--mode", "tick", "--loop", "night", "--project", scratch.project];
    assertEquals(await read({ PATH: "/usr/bin:/bin" }), [
      scratch.project,
      "/opt/my tools/bin:/usr/bin:/usr/bin:/bin",
      "420",
      ...words,
    ]);
    assertEquals((await read({ PATH: "/bin" }, ""))[1], "/bin", "no empty folder on the PATH");
  },
});

Deno.test({
  name: "the script ends where its project is gone",
  ignore: Deno.build.os === "windows",
  fn: async () => {
    using scratch = makeScratch();
    const script = join(scratch.dir, "tick.sh");
    writeScript(script, renderTickScript(makeJob("cron", 3600, { project: "/no/such" })));
    const { code, stderr } = await run(scratch, [script]);
    assertEquals(code, 1);
    assertMatch(stderr, /\/no\/such/);
  },
});

Deno.test("a cron line that cron would refuse for its length is refused before", () => {
  const project = (length: number) => `/${"é".repeat(length)}`;
  renderCronLines(makeJob("cron", 60, { project: project(180) }));
  assertThrows(
    () => renderCronLines(makeJob("cron", 60, { project: project(240) })),
    Error,
    "over 980",
  );
});

Deno.test("the CronJob is one that Kubernetes takes, and has what keeps it in bounds", () => {
  const job = makeJob("kubernetes", 2700);
  const environment = {
    AUTOMATON_DUE_INTERVAL_S: "2700",
    AUTOMATON_DUE_PERIOD_S: "900",
    AUTOMATON_HOME: "/only/here",
  };
  const found: ICronJob = parseYaml(renderCronJob({ ...job, environment }));
  // Typed, so that a field which Kubernetes does not know fails the type check.
  const expected: ICronJob = {
    apiVersion: "batch/v1",
    kind: "CronJob",
    metadata: { name: "automaton-loop-night" },
    spec: {
      schedule: "*/15 * * * *",
      concurrencyPolicy: "Forbid",
      successfulJobsHistoryLimit: 1,
      failedJobsHistoryLimit: 3,
      jobTemplate: {
        spec: {
          backoffLimit: 0,
          activeDeadlineSeconds: 86_400,
          template: {
            spec: {
              restartPolicy: "Never",
              automountServiceAccountToken: false,
              securityContext: {
                runAsNonRoot: true,
                runAsUser: 1000,
                runAsGroup: 1000,
                fsGroup: 1000,
                seccompProfile: { type: "RuntimeDefault" },
              },
              containers: [{
                name: "tick",
                image: "automaton:latest",
                command: ["loop-runner"],
                args: ["--mode", "tick", "--loop", "night", "--project", "/project"],
                workingDir: "/project",
                env: [
                  { name: "HOME", value: "/tmp" },
                  { name: "AUTOMATON_DUE_INTERVAL_S", value: "2700" },
                  { name: "AUTOMATON_DUE_PERIOD_S", value: "900" },
                ],
                securityContext: {
                  allowPrivilegeEscalation: false,
                  capabilities: { drop: ["ALL"] },
                },
                volumeMounts: [{ name: "project", mountPath: "/project" }],
              }],
              volumes: [{
                name: "project",
                persistentVolumeClaim: { claimName: "automaton-loop-night" },
              }],
            },
          },
        },
      },
    },
  };
  assertEquals(found, expected);
  new CronJob(found).validate();
});

Deno.test("a CronJob's name is one that Kubernetes takes, however the loop is called", () => {
  for (const loop of ["0", "a-", `${"a".repeat(36)}-${"b".repeat(26)}`, "x".repeat(63)]) {
    const found: ICronJob = parseYaml(renderCronJob({ ...makeJob("kubernetes", 300), loop }));
    assertMatch(found.metadata!.name!, /^[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?$/);
  }
});

Deno.test("loops of different names have CronJobs of different names", () => {
  const start = "a".repeat(37);
  const loops = ["a", "a-", "a--", start, `${start}a`, `${start}b`, `${start}-`, `${start}-b`];
  const names = loops.map((loop) =>
    parseYaml(renderCronJob({ ...makeJob("kubernetes", 300), loop })).metadata.name
  );
  assertEquals(new Set(names).size, loops.length, `${names}`);
});

Deno.test("the workflow is one that GitHub takes, alone, bounded, with one permission", () => {
  for (const seconds of [300, 420, 2700, 5400, 86_400]) {
    const text = renderWorkflow(makeJob("github-actions", seconds));
    assertEquals(validateWorkflow(text).errors, [], text);
    const workflow = parseYaml(text);
    assertEquals(workflow.permissions, { contents: "write" });
    assertEquals(workflow.concurrency, {
      group: "automaton-loop-night",
      "cancel-in-progress": false,
    });
    assertEquals(workflow.jobs.tick["timeout-minutes"], 360);
    for (const { uses } of workflow.jobs.tick.steps) {
      assert(uses === undefined || /@[0-9a-f]{40}$/.test(uses), `${uses} is not pinned`);
    }
  }
  const invalid = renderWorkflow(makeJob("github-actions", 300)).replace("runs-on:", "run-on:");
  assert(validateWorkflow(invalid).errors.length > 0, "the validator finds nothing at all");
});

Deno.test({
  name: "the workflow's own commands are sound sh",
  ignore: !isInstalled("sh"),
  fn: async () => {
    using scratch = makeScratch();
    const workflow = parseYaml(renderWorkflow(makeJob("github-actions", 420)));
    for (const { run: script } of workflow.jobs.tick.steps) {
      if (script === undefined) continue;
      const { code, stderr } = await run(scratch, ["sh", "-n", "-c", script]);
      assertEquals([code, stderr], [0, ""]);
    }
  },
});
