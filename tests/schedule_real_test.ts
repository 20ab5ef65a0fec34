/**
 * Schedules in the real launchd and the real task scheduler, which are only to be had on macOS and on Windows,
 * and only in CI: nobody's own machine is touched. cron has a test of its own.
 */
import { assert, assertEquals, assertNotEquals } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import { ROOT } from "./helpers.ts";

const NAME = `automaton-test-${Deno.pid}`;

/** Why a scheduler cannot be tried here; an empty text where it can. */
function findObstacle(os: typeof Deno.build.os, name: string): string {
  if (Deno.build.os !== os) return ` (ignored: needs ${name})`;
  return Deno.env.has("CI") ? "" : " (ignored: changes this machine's schedules, so only in CI)";
}

interface Outcome {
  readonly code: number;
  readonly text: string;
}

/** Runs a command with the environment of the tests: a scheduler is nothing without its session. */
function call(command: string, args: readonly string[]): Outcome {
  const { code, stdout, stderr } = new Deno.Command(command, { args: [...args], stdin: "null" })
    .outputSync();
  return { code, text: [stdout, stderr].map((bytes) => new TextDecoder().decode(bytes)).join("") };
}

/** Runs status from its source on a project; requires success. */
function status(project: string, ...args: string[]): void {
  const script = join(ROOT, "scripts", "status.ts");
  const words = ["run", "-q", "--no-prompt", "-P=status", script, ...args, "--project", project];
  const { code, text } = call(Deno.execPath(), words);
  assertEquals(code, 0, `${args.join(" ")}: ${text}`);
}

/** Installs, pauses, resumes and removes a schedule; `isLoaded` asks the scheduler whether it ticks. */
function tryScheduler(scheduler: string, isLoaded: () => boolean): void {
  const project = Deno.makeTempDirSync({ prefix: "automaton test " });
  Deno.mkdirSync(join(project, ".automaton"));
  try {
    status(project, "--create-loop", NAME, "--from-template", "ci-triage");
    const install = ["--install-schedule", NAME, "--interval", "3600", "--scheduler", scheduler];
    status(project, ...install);
    try {
      assert(isLoaded(), "not loaded after the installation");
      status(project, "--pause-loop", NAME);
      assert(!isLoaded(), "loaded while it is paused");
      status(project, "--resume-loop", NAME);
      assert(isLoaded(), "not loaded after the pause");
    } finally {
      status(project, "--uninstall-schedule", NAME);
    }
    assert(!isLoaded(), "loaded after its removal");
  } finally {
    Deno.removeSync(project, { recursive: true });
  }
}

const NO_LAUNCHD = findObstacle("darwin", "macOS");

Deno.test({
  name: `launchd takes a schedule, and gives it up for a pause and for good${NO_LAUNCHD}`,
  ignore: NO_LAUNCHD !== "",
  fn() {
    const label = `com.automaton.loop.${NAME}`;
    const plist = join(Deno.env.get("HOME") ?? "", "Library", "LaunchAgents", `${label}.plist`);
    const domains = ["gui", "user"].map((domain) => `${domain}/${Deno.uid()}/${label}`);
    tryScheduler(
      "launchd",
      () => domains.some((each) => call("launchctl", ["print", each]).code === 0),
    );
    assert(!existsSync(plist), `${plist} is left`);
    assert(!existsSync(`${plist}.disabled`), `${plist}.disabled is left`);
  },
});

const NO_SCHTASKS = findObstacle("windows", "Windows");

Deno.test({
  name:
    `the task scheduler takes a schedule, and gives it up for a pause and for good${NO_SCHTASKS}`,
  ignore: NO_SCHTASKS !== "",
  fn() {
    const task = `AutomatonLoop_${NAME}`;
    // The words of schtasks are translated, those of its XML are not.
    const query = () => call("schtasks", ["/query", "/tn", task, "/xml"]);
    tryScheduler("schtasks", () => {
      const { code, text } = query();
      return code === 0 && !/<Settings>[^]*<Enabled>false<\/Enabled>[^]*<\/Settings>/.test(text);
    });
    assertNotEquals(query().code, 0, "the task is left");
  },
});
