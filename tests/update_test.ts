/** update.sh: what it moves forward, what it refuses, and that a failed update changes nothing. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import {
  finish,
  git,
  lastJson,
  makeScratch,
  poll,
  readJson,
  type Result,
  run,
  type RunOptions,
  type Scratch,
  snapshot,
  start,
  writeFile,
  writeScript,
} from "./helpers.ts";
import {
  fakeCron,
  gitStatus,
  HAS_SH,
  isInstalled,
  makeCheckout,
  makePath,
  names,
  NO_COMPILE_REASON,
  programIdentities,
  runSh,
  SHELLS,
} from "./install_support.ts";

const LOOP = "self-improvement";
/** What a refused update may touch: git's own index and fetched objects. */
const GIT = [".git"];

/** A repository with two versions, and a checkout of the first that is told where the second is. */
interface Versions {
  readonly upstream: string;
  readonly checkout: string;
}

function testUpdate(
  name: string,
  fn: (scratch: Scratch, versions: Versions) => Promise<void>,
  ignore = false,
): void {
  Deno.test({
    name: `update.sh ${name}`,
    ignore: ignore || !HAS_SH,
    async fn() {
      using scratch = makeScratch();
      const upstream = makeCheckout(scratch, "upstream");
      const checkout = join(scratch.dir, 'it\'s an "old%20" é');
      git(scratch, scratch.dir, "clone", "--quiet", upstream, checkout);
      await fn(scratch, { upstream, checkout });
    },
  });
}

/** Publishes a version with another number, and other files changed as told. */
function publish(
  scratch: Scratch,
  upstream: string,
  version: string,
  files: Readonly<Record<string, (text: string) => string>> = {},
): void {
  const all = {
    "config.md": (text: string) => text.replace(/^version: .*$/m, `version: ${version}`),
    ...files,
  };
  for (const [name, change] of Object.entries(all)) {
    const path = join(upstream, name);
    writeFile(path, change(existsSync(path) ? Deno.readTextFileSync(path) : ""));
  }
  git(scratch, upstream, "add", "--all");
  git(scratch, upstream, "commit", "--quiet", "-m", `version ${version}`);
}

/** Changes a program, so that its compiled form is another one too. */
const CHANGED = { "scripts/loop-runner.ts": (text: string) => `${text}// A newer version.\n` };

async function install(
  scratch: Scratch,
  checkout: string,
  args: readonly string[] = ["--no-schedule"],
  options: RunOptions = {},
): Promise<void> {
  const result = await runSh(scratch, join(checkout, "install.sh"), args, options);
  assertEquals(result.code, 0, `${result.stdout}${result.stderr}`);
}

async function update(
  scratch: Scratch,
  checkout: string,
  args: readonly string[] = [],
  options: RunOptions & { readonly shell?: readonly string[] } = {},
): Promise<Result> {
  const result = await runSh(scratch, join(checkout, "update.sh"), args, options);
  assertEquals(result.code, 0, `${result.stdout}${result.stderr}`);
  return result;
}

/** Requires a refusal that changes nothing but what git has fetched. */
async function refuse(
  scratch: Scratch,
  checkout: string,
  message: RegExp,
  hint: string,
  options: RunOptions = {},
): Promise<void> {
  const [head, files] = [git(scratch, checkout, "rev-parse", "HEAD"), snapshot(checkout, GIT)];
  const { code, stdout, stderr } = await runSh(scratch, join(checkout, "update.sh"), [], options);
  assertEquals([code, stdout], [1, ""], stderr);
  assertMatch(stderr, message);
  assertStringIncludes(stderr, `hint: ${hint}`);
  assertEquals(git(scratch, checkout, "rev-parse", "HEAD"), head);
  assertEquals(snapshot(checkout, GIT), files);
}

async function version(scratch: Scratch, checkout: string): Promise<string> {
  const { stdout, stderr } = await run(scratch, [join(checkout, "bin", "status"), "--version"]);
  return stdout.trim() || stderr;
}

/** git as a hint quotes it. */
const inCheckout = (checkout: string, words: string) =>
  `git -C '${checkout.replaceAll("'", `'\\''`)}' ${words}`;

// --- Forward ---

testUpdate("brings a new version and keeps a paused loop paused", async (scratch, versions) => {
  const { upstream, checkout } = versions;
  const table = fakeCron(scratch);
  await install(scratch, checkout, []);
  const status = join(checkout, "bin", "status");
  const words = [status, "--pause-loop", LOOP, "--project", checkout];
  const pause = await run(scratch, words);
  assertEquals(pause.code, 0, pause.stderr);
  const loop = () => snapshot(join(checkout, ".automaton"));
  const [before, crontab] = [loop(), Deno.readTextFileSync(table)];
  publish(scratch, upstream, "9.0.0", CHANGED);
  const { stderr } = await update(scratch, checkout);
  assertMatch(stderr, /update: updated from \w+ \(a version\) to \w+ \(version 9\.0\.0\)\n$/);
  assertStringIncludes(stderr, "states of tasks and loops that need no change: 1");
  assertEquals(await version(scratch, checkout), "status 9.0.0");
  assertEquals(loop(), before);
  assertEquals(Deno.readTextFileSync(table), crontab);
  assertEquals(readJson(join(checkout, ".install-receipt.json")).version, "9.0.0");
  assertEquals(gitStatus(scratch, checkout), "");
});

testUpdate("has nothing to do twice", async (scratch, { upstream, checkout }) => {
  await install(scratch, checkout);
  publish(scratch, upstream, "9.0.0");
  await update(scratch, checkout);
  const before = [snapshot(checkout, [...GIT, ".deno"]), programIdentities(checkout)];
  const { stderr } = await update(scratch, checkout);
  assertMatch(stderr, /update: nothing new in origin\/main\n/);
  assertMatch(stderr, /update: \w+ \(version 9\.0\.0\) is the newest version\n$/);
  assertEquals([snapshot(checkout, [...GIT, ".deno"]), programIdentities(checkout)], before);
});

testUpdate("makes the loop where there is none, unless it was not wanted", async (scratch, {
  checkout,
}) => {
  const table = fakeCron(scratch);
  const dir = join(checkout, ".automaton", "loops", LOOP);
  await install(scratch, checkout, ["--no-loop"]);
  await update(scratch, checkout);
  assert(!existsSync(dir), "made a loop that was not wanted");
  await install(scratch, checkout, ["--no-schedule"]);
  Deno.removeSync(dir, { recursive: true });
  await update(scratch, checkout);
  assert(existsSync(join(dir, ".state.loop")), "made no loop");
  assert(!existsSync(table), "made a schedule that was not wanted");
  await install(scratch, checkout, []);
  const remove = [join(checkout, "bin", "status"), "--remove-loop", LOOP, "--purge"];
  assertEquals((await run(scratch, [...remove, "--project", checkout])).code, 0);
  assertEquals(Deno.readTextFileSync(table), "");
  await update(scratch, checkout);
  assertStringIncludes(Deno.readTextFileSync(table), dir.slice(-20));
});

testUpdate("installs where nothing is installed yet", async (scratch, { checkout }) => {
  fakeCron(scratch);
  await update(scratch, checkout);
  assertEquals(names(join(checkout, "bin")), ["loop-runner", "status", "vram-detect"]);
});

for (const shell of SHELLS) {
  testUpdate(`runs under ${shell.join(" ")}, which must be installed`, async (scratch, {
    upstream,
    checkout,
  }) => {
    await install(scratch, checkout, ["--no-loop"]);
    publish(scratch, upstream, "9.0.0");
    await update(scratch, checkout, [], { shell });
    assertEquals(await version(scratch, checkout), "status 9.0.0");
  }, !isInstalled(shell[0]!));
}

testUpdate("--dry-run says what would be done and changes nothing", async (scratch, {
  upstream,
  checkout,
}) => {
  const all = () => snapshot(checkout, [".git/index"]);
  const before = all();
  assertMatch((await update(scratch, checkout, ["--dry-run"])).stdout, /would find nothing new/);
  publish(scratch, upstream, "9.0.0");
  const newest = git(scratch, upstream, "rev-parse", "HEAD");
  const { stdout } = await update(scratch, checkout, ["--dry-run"]);
  assertStringIncludes(stdout, `to ${newest} of origin/main`);
  assertEquals(all(), before);
});

// --- A tick that runs ---

for (const form of ["launchers", "compiled programs"]) {
  const isCompiled = form === "compiled programs";
  testUpdate(
    `does not disturb a tick that runs from ${form}${
      isCompiled && NO_COMPILE_REASON !== null ? ` (${NO_COMPILE_REASON})` : ""
    }`,
    async (scratch, { upstream, checkout }) => {
      const env = isCompiled ? { DENORT_BIN: Deno.env.get("DENORT_BIN") } : {};
      const compiler = Deno.env.get("AUTOMATON_COMPILE_DENO");
      const options = {
        env: { ...env, ...isCompiled ? { AUTOMATON_COMPILE_DENO: compiler } : {} },
      };
      const flags = isCompiled ? ["--require-compile"] : [];
      await install(scratch, checkout, ["--no-loop", ...flags], options);
      const { tick, goOn, isWaiting } = await startTick(scratch, checkout);
      await poll("the agent's start", isWaiting);
      publish(scratch, upstream, "9.0.0", CHANGED);
      await update(scratch, checkout, flags, options);
      assertEquals(await version(scratch, checkout), "status 9.0.0");
      goOn();
      const summary = lastJson(await finish(tick));
      const { ok, skipped, verdict, next_phase, iteration_count } = summary;
      assertEquals(
        [ok, skipped, (verdict as { pass: boolean } | null)?.pass, next_phase, iteration_count],
        [true, false, true, "design", 1],
        JSON.stringify(summary),
      );
    },
    isCompiled && NO_COMPILE_REASON !== null,
  );
}

/** Starts a tick in a project, with an agent that waits until it is told to go on. */
async function startTick(scratch: Scratch, checkout: string) {
  const program = (name: string) => join(checkout, "bin", name);
  const [waiting, gate] = [join(scratch.dir, "waiting"), join(scratch.dir, "gate")];
  const agent = join(scratch.dir, "agent");
  writeScript(
    agent,
    `#!/bin/sh
if [ "$AUTOMATON_ROLE" = implement ]; then
  touch '${waiting}'
  while [ ! -e '${gate}' ]; do sleep 0.05; done
  echo work >>work.txt
else
  printf '{"pass": true, "score": 1, "reasons": ["done"]}\\n'
fi
`,
  );
  writeFile(
    join(scratch.project, ".automaton/models.json"),
    '{"default": "m", "models": {"m": {"context_tokens": 32768}}}',
  );
  git(scratch, scratch.project, "init", "--quiet");
  git(scratch, scratch.project, "commit", "--quiet", "--allow-empty", "-m", "start");
  const config = {
    name: "busy",
    roles: {},
    work_source: { kind: "single" },
    harness: { command: [agent], stdin: "prompt" },
  };
  for (
    const args of [["--create-task", "a-task"], [
      "--create-loop",
      "busy",
      "--from-template",
      "ci-triage",
      "--task",
      "a-task",
    ]]
  ) {
    const made = await run(scratch, [program("status"), ...args]);
    assertEquals(made.code, 0, made.stderr);
  }
  writeFile(join(scratch.project, ".automaton/loops/busy/loop.json"), JSON.stringify(config));
  return {
    tick: start(scratch, [program("loop-runner"), "--mode", "tick", "--loop", "busy", "--json"]),
    isWaiting: () => existsSync(waiting),
    goOn: () => Deno.writeTextFileSync(gate, ""),
  };
}

// --- Refusals ---

testUpdate("refuses a checkout with changes, and takes one with new files", async (scratch, {
  upstream,
  checkout,
}) => {
  await install(scratch, checkout, ["--no-loop"]);
  publish(scratch, upstream, "9.0.0");
  const prompt = join(checkout, "prompts", "loop-implement.md");
  const text = Deno.readTextFileSync(prompt);
  Deno.writeTextFileSync(prompt, `${text}mine\n`);
  const message =
    /^update: Cannot update: the checkout has changes of its own:\n M prompts\/loop-implement\.md\n/;
  await refuse(scratch, checkout, message, inCheckout(checkout, "stash, "));
  git(scratch, checkout, "add", "--all");
  await refuse(scratch, checkout, /:\nM {2}prompts\//, inCheckout(checkout, "stash, "));
  Deno.writeTextFileSync(prompt, text);
  git(scratch, checkout, "add", "--all");
  writeFile(join(checkout, "notes.txt"), "mine");
  await update(scratch, checkout);
  assertEquals(Deno.readTextFileSync(join(checkout, "notes.txt")), "mine");
});

testUpdate("refuses to overwrite a file that git does not know", async (scratch, {
  upstream,
  checkout,
}) => {
  publish(scratch, upstream, "9.0.0", { "notes.txt": () => "theirs" });
  writeFile(join(checkout, "notes.txt"), "mine");
  const { code, stderr } = await runSh(scratch, join(checkout, "update.sh"));
  assertEquals(code, 1);
  assertMatch(stderr, /notes\.txt[^]*update: Cannot move the checkout to \w+ \(version 9\.0\.0\)/);
  assertEquals(Deno.readTextFileSync(join(checkout, "notes.txt")), "mine");
});

testUpdate("refuses a branch that has diverged, and takes one that is ahead", async (scratch, {
  upstream,
  checkout,
}) => {
  git(scratch, checkout, "commit", "--quiet", "--allow-empty", "-m", "mine");
  const { stderr } = await update(scratch, checkout, [], { env: { HOME: scratch.home } });
  assertMatch(stderr, /nothing new in origin\/main[^]*\(mine\) is the newest version/);
  publish(scratch, upstream, "9.0.0");
  const message = /^update: Cannot update: branch "main" has commits that origin\/main has not/m;
  await refuse(scratch, checkout, message, inCheckout(checkout, "rebase origin/main"));
});

testUpdate("refuses what it cannot move forward, and says how to go on", async (scratch, {
  checkout,
}) => {
  git(scratch, checkout, "switch", "--quiet", "--create", "own");
  await refuse(
    scratch,
    checkout,
    /branch "own" follows no branch/,
    inCheckout(checkout, "branch --set"),
  );
  git(scratch, checkout, "switch", "--quiet", "--detach");
  await refuse(scratch, checkout, /no branch is checked out/, inCheckout(checkout, "switch main"));
  git(scratch, checkout, "switch", "--quiet", "main");
  const PATH = makePath(scratch, ["dirname", "grep", "readlink", "sed", "sh"]);
  await refuse(scratch, checkout, /git was not found on PATH/, "install git", { env: { PATH } });
});

testUpdate(
  "refuses where the remote cannot be reached",
  async (scratch, { upstream, checkout }) => {
    await install(scratch, checkout);
    Deno.renameSync(upstream, `${upstream} is gone`);
    const message = /update: Cannot fetch origin\/main: see above; nothing was changed/;
    await refuse(scratch, checkout, message, "check the network");
    assertEquals(await version(scratch, checkout), await versionOf(checkout));
  },
);

function versionOf(checkout: string): string {
  const text = Deno.readTextFileSync(join(checkout, "config.md"));
  return `status ${/^version: (.*)$/m.exec(text)?.[1]}`;
}

testUpdate("refuses what is no git checkout of its own", async (scratch, { checkout }) => {
  Deno.removeSync(join(checkout, ".git"), { recursive: true });
  const script = join(checkout, "update.sh");
  const none = await runSh(scratch, script);
  assertEquals(none.code, 1);
  assertStringIncludes(none.stderr, "it is no git checkout");
  git(scratch, scratch.dir, "init", "--quiet");
  const inner = await runSh(scratch, script);
  assertEquals(inner.code, 1);
  assertStringIncludes(inner.stderr, `it belongs to the git checkout "${scratch.dir}"`);
});

testUpdate("is not for the sessions of a loop, and knows its options", async (scratch, {
  checkout,
}) => {
  const script = join(checkout, "update.sh");
  const session = await runSh(scratch, script, [], { env: { AUTOMATON_ROLE: "implement" } });
  assertEquals(session.code, 1);
  assertStringIncludes(session.stderr, "only a person installs, updates");
  const wrong = await runSh(scratch, script, ["--force"]);
  assertEquals([wrong.code, wrong.stdout], [2, ""]);
  assertStringIncludes(wrong.stderr, 'Cannot use option "--force"');
  const help = await runSh(scratch, script, ["--help"]);
  assertEquals([help.code, help.stderr], [0, ""]);
  assertStringIncludes(help.stdout, "usage: update.sh");
});

// --- Failures half-way ---

testUpdate("goes back where the new version cannot be installed", async (scratch, {
  upstream,
  checkout,
}) => {
  await install(scratch, checkout);
  const [head, before] = [git(scratch, checkout, "rev-parse", "HEAD"), programIdentities(checkout)];
  const broken = { "scripts/status.ts": () => "throw new Error('broken');\n" };
  publish(scratch, upstream, "9.0.0", broken);
  const { code, stderr } = await runSh(scratch, join(checkout, "update.sh"));
  assertEquals(code, 1);
  assertMatch(
    stderr,
    /update: Cannot update to \w+ \(version 9\.0\.0\): it could not be installed/,
  );
  assertMatch(stderr, /the checkout is back at \w+ \(a version\)/);
  assertEquals(git(scratch, checkout, "rev-parse", "HEAD"), head);
  assertEquals(programIdentities(checkout), before);
  assertEquals(await version(scratch, checkout), versionOf(checkout));
  publish(scratch, upstream, "9.0.1", {
    "scripts/status.ts": () => git(scratch, upstream, "show", `${head}:scripts/status.ts`),
  });
  await update(scratch, checkout);
  assertEquals(await version(scratch, checkout), "status 9.0.1");
});

testUpdate(
  "goes on where one that was killed left off",
  async (scratch, { upstream, checkout }) => {
    await install(scratch, checkout, ["--no-loop"]);
    publish(scratch, upstream, "9.0.0", CHANGED);
    const started = join(scratch.dir, "started");
    const compiler = join(scratch.dir, "compiler");
    writeScript(
      compiler,
      `#!/bin/sh
case $1 in
  --version) echo 'deno 2.9.6' ;;
  compile) touch '${started}'; exec sleep 300 ;;
esac
`,
    );
    const env = {
      AUTOMATON_COMPILE_DENO: compiler,
      DENORT_BIN: compiler,
      AUTOMATON_DENO: Deno.execPath(),
    };
    const child = start(scratch, ["setsid", "sh", join(checkout, "update.sh")], { env });
    await poll("start of the compiler", () => existsSync(started));
    Deno.kill(-child.pid, "SIGKILL");
    await finish(child);
    assertEquals((await run(scratch, [join(checkout, "bin/loop-runner"), "--help"])).code, 0);
    await update(scratch, checkout);
    assertEquals(await version(scratch, checkout), "status 9.0.0");
  },
);
