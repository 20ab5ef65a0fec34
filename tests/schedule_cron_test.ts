/** The schedule under Debian's own cron: a line that fires, a pause that stops it, a table put back. */
import { assert, assertEquals, assertMatch } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import {
  lastJson,
  loopDir,
  makeRepository,
  makeScratch,
  poll,
  readLog,
  run,
  type RunOptions,
  type Scratch,
  writeLoop,
  writeScript,
  writeTask,
} from "./helpers.ts";
import { copyCheckout, IS_ROOT, isInstalled } from "./install_support.ts";
import type { Json } from "./status_support.ts";

/** Why this machine cannot run the test; null where it can. */
function findObstacle(): string | null {
  if (Deno.build.os !== "linux") return "cron runs on Linux here";
  if (!IS_ROOT) return "only root can start cron and make a user";
  const missing = ["cron", "crontab", "useradd", "runuser"].filter((name) => !isInstalled(name));
  return missing.length === 0 ? null : `${missing.join(", ")} not installed`;
}

const OBSTACLE = findObstacle();
const FIRE_MS = 130_000;

/** A user whose home is the scratch folder's, for as long as the test lasts. */
function makeUser(scratch: Scratch): { name: string; as: RunOptions } & Disposable {
  const name = `automaton-test-${Deno.pid}`;
  const sh = (script: string, ...args: string[]) => {
    const { success, stderr } = new Deno.Command("sh", { args: ["-c", script, "sh", ...args] })
      .outputSync();
    return success ? null : new TextDecoder().decode(stderr);
  };
  const problem = sh(
    'useradd --no-create-home --home-dir "$2" --shell /bin/sh "$1" && chown -R "$1" "$3"',
    name,
    scratch.home,
    scratch.dir,
  );
  if (problem !== null) throw new Error(`useradd: ${problem}`);
  const env = { USER: name, LOGNAME: name, DENO_DIR: undefined, AUTOMATON_CONTEXT_TOKENS: "32768" };
  return {
    name,
    as: { prefix: ["runuser", "-u", name, "--"], env },
    [Symbol.dispose]: () => {
      sh('crontab -u "$1" -r; userdel "$1"', name);
    },
  };
}

/** Starts cron in the foreground, unless this machine runs one already. */
function startCron(): AsyncDisposable {
  const running = new Deno.Command("sh", {
    args: ["-c", "cat /proc/[0-9]*/comm 2>/dev/null | grep -qx cron"],
  }).outputSync().success;
  if (running) return { [Symbol.asyncDispose]: () => Promise.resolve() };
  const child = new Deno.Command("cron", { args: ["-f"], stdout: "null", stderr: "null" }).spawn();
  return {
    [Symbol.asyncDispose]: async () => {
      child.kill("SIGTERM");
      await child.status;
    },
  };
}

function readTable(user: string): Uint8Array {
  return new Deno.Command("crontab", { args: ["-u", user, "-l"] }).outputSync().stdout;
}

/** A person's own table: comments, variables, latin-1, odd blanks, and no newline at its end. */
function writeTable(scratch: Scratch, user: string, control: string): Uint8Array {
  const lines = [
    "# Sauvegardes d'\xe9t\xe9",
    "MAILTO=''",
    "",
    "  17 3 1 1 *\techo \xfc\xdf \\% done",
    `* * * * * echo start >>${control}; sleep 4; echo end >>${control}`,
    "# automaton-loop:night is not ours to touch: ' # automaton-loop:night'",
    "# the end",
  ];
  const bytes = Uint8Array.from(lines.join("\n"), (character) => character.charCodeAt(0));
  const file = join(scratch.dir, "table");
  Deno.writeFileSync(file, bytes);
  const { success, stderr } = new Deno.Command("crontab", { args: ["-u", user, file] })
    .outputSync();
  assert(success, new TextDecoder().decode(stderr));
  return bytes;
}

/** A loop with a task, and an agent that writes down where it was started. */
function prepareLoop(scratch: Scratch): string {
  makeRepository(scratch);
  const dir = writeLoop(scratch, "night", {
    harness: { command: ["automaton-test-agent", "{role}"], stdin: "none" },
    roles: { orchestrate: null },
  }, { current_task: "job" });
  writeTask(scratch, "job", "research", { loop: "night" });
  writeScript(
    join(scratch.bin, "automaton-test-agent"),
    `#!/bin/sh
[ "$1" != verify ] || { echo '{"pass": true, "score": 1}'; exit; }
echo "$PWD" >>"$AUTOMATON_PROJECT/../agent.log"
echo found
`,
  );
  return dir;
}

const readLines = (path: string): string[] =>
  existsSync(path) ? Deno.readTextFileSync(path).trimEnd().split("\n") : [];

Deno.test({
  name: `a schedule fires under Debian's cron, stops at a pause and goes without a trace${
    OBSTACLE === null ? "" : ` (not here: ${OBSTACLE})`
  }`,
  ignore: OBSTACLE !== null,
  fn: async (t) => {
    using scratch = makeScratch(`it's 100% "x"`);
    const framework = copyCheckout(join(scratch.dir, "framework"));
    const deno = join(framework, "deno");
    Deno.copyFileSync(Deno.execPath(), deno);
    const dir = prepareLoop(scratch);
    using user = makeUser(scratch);
    const control = join(scratch.home, "control");
    const before = writeTable(scratch, user.name, control);
    const writtenMs = Date.now();
    const status = async (...args: string[]): Promise<Json> => {
      const script = join(framework, "scripts", "status.ts");
      const argv = [deno, "run", "-q", "--no-prompt", "-P=status", script, ...args, "--json"];
      const result = await run(scratch, argv, user.as);
      assertEquals(result.code, 0, result.stdout + result.stderr);
      return lastJson(result);
    };
    await using _cron = startCron();
    // cron tells tables apart by the second in which they were written: not the same as the next change.
    await poll("next second", () => Date.now() > writtenMs + 1000);
    const output = join(dir, "schedule.log");
    const describe = () =>
      JSON.stringify({
        log: readLog(scratch, "night"),
        control: readLines(control),
        output: readLines(output),
      });
    const ticks = () => readLog(scratch, "night").filter(({ event }) => event === "TICK").length;

    await t.step("it is installed for the cron that is there", async () => {
      const installed = await status("--install-schedule=night", "--interval=60");
      assertEquals([installed.scheduler, installed.exact, installed.paused], ["cron", true, false]);
      assertEquals((installed.next_fires as string[]).length, 3);
      assertEquals(installed.agent, join(scratch.bin, "automaton-test-agent"));
      const table = new TextDecoder("latin1").decode(readTable(user.name));
      assertMatch(table, /^# the end\n\* \* \* \* \* '.* # automaton-loop:night\n$/m);
      const { checks } = await status("--doctor");
      const lines = (checks as Json[]).filter(({ name }) =>
        `${name}` === "scheduler" || `${name}`.startsWith("loop")
      );
      assertEquals(lines.map((line) => line.status), ["ok", "ok", "ok"], JSON.stringify(checks));
    });
    await t.step("it fires, and the tick works and writes its log", async () => {
      const isTold = () => readLines(output).some((line) => line.startsWith("night tick 1: job"));
      await poll("tick by cron", isTold, { timeoutMs: FIRE_MS, describe });
      assert(ticks() > 0, describe());
      const agent = Deno.readTextFileSync(join(scratch.dir, "agent.log")).trim();
      assertEquals(agent, join(loopDir(scratch, "night"), "worktree"));
    });
    await t.step("a pause stops it, while the person's own lines go on", async () => {
      await status("--pause-loop=night");
      const starts = () => readLines(control).filter((line) => line === "start").length;
      const seen = starts();
      await poll("next minute of cron", () => starts() > seen, { timeoutMs: FIRE_MS, describe });
      // A tick of this minute would say something before the person's own line has ended.
      const before = [ticks(), readLines(output)];
      await poll("its end", () => readLines(control).at(-1) === "end", { describe });
      assertEquals([ticks(), readLines(output)], before);
    });
    await t.step("it goes, and the table is as it was, byte for byte", async () => {
      await status("--resume-loop=night");
      await status("--uninstall-schedule=night");
      assertEquals(readTable(user.name), before);
      assert(!existsSync(join(dir, "automaton-loop-tick.sh")));
      assert(!existsSync(join(dir, "schedule.json")));
    });
  },
});
