/**
 * What tests share: folders of their own, the programs as processes with their own permissions and
 * an environment built from nothing, git repositories, states, and waiting without fixed sleeps.
 */
import { ensureDirSync } from "@std/fs";
import { dirname, fromFileUrl, join } from "@std/path";

/** This checkout. */
export const ROOT = fromFileUrl(new URL("../", import.meta.url)).replace(/[/\\]$/, "");

/** The programs, by the name of their script and of their permission set. */
export type Program = "status" | "loop-runner" | "vram-detect";

/** What a finished process left. */
export interface Result {
  readonly code: number;
  readonly signal: Deno.Signal | null;
  readonly stdout: string;
  readonly stderr: string;
}

/** How to start a process; what is absent comes from the scratch folder. */
export interface RunOptions {
  readonly cwd?: string;
  /** Added to the scratch folder's environment; undefined takes a variable away. */
  readonly env?: Readonly<Record<string, string | undefined>>;
  /** After this the process is killed and the test fails. */
  readonly timeoutMs?: number;
  /** Words in front of the command line, e.g. `setpriv --reuid nobody`. */
  readonly prefix?: readonly string[];
}

/** A folder for one test, with a project, a home and a PATH folder in it; removed at the end. */
export interface Scratch extends Disposable {
  readonly dir: string;
  /** Holds `.automaton/`. */
  readonly project: string;
  readonly home: string;
  /** First folder of PATH, empty at first: programs in it stand in for those of the system. */
  readonly bin: string;
  /** The whole environment of the processes. */
  readonly env: Readonly<Record<string, string>>;
}

const SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

let denoDir: string | undefined;

/** The cache that this Deno uses: a new one for each scratch home would cost a second a process. */
function findDenoDir(): string {
  if (denoDir !== undefined) return denoDir;
  const { stdout } = new Deno.Command(Deno.execPath(), { args: ["info", "--json"] }).outputSync();
  const info: { denoDir: string } = JSON.parse(new TextDecoder().decode(stdout));
  return denoDir = info.denoDir;
}

/**
 * Makes a scratch folder: `using scratch = makeScratch();`
 *
 * @param projectName The project folder's name below the scratch folder; may hold any character.
 */
export function makeScratch(projectName = "project"): Scratch {
  const dir = Deno.realPathSync(Deno.makeTempDirSync({ prefix: "automaton-test-" }));
  const [project, home, bin] = [join(dir, projectName), join(dir, "home"), join(dir, "bin")];
  for (const path of [join(project, ".automaton"), home, bin, join(dir, "tmp")]) {
    ensureDirSync(path);
  }
  Deno.writeTextFileSync(
    join(home, ".gitconfig"),
    "[user]\nname = Test\nemail = test@example.invalid\n[init]\ndefaultBranch = main\n" +
      '[protocol "file"]\nallow = always\n[advice]\ndetachedHead = false\n',
  );
  const env = {
    PATH: `${bin}:${SYSTEM_PATH}`,
    HOME: home,
    TMPDIR: join(dir, "tmp"),
    DENO_DIR: findDenoDir(),
    GIT_CONFIG_NOSYSTEM: "1",
    LC_ALL: "C.UTF-8",
    NO_COLOR: "1",
  };
  return { dir, project, home, bin, env, [Symbol.dispose]: () => removeTree(dir) };
}

/** Removes a folder with all in it, also where a test has taken write permission away. */
export function removeTree(dir: string): void {
  try {
    Deno.removeSync(dir, { recursive: true });
  } catch (error) {
    if (error instanceof Deno.errors.NotFound) return;
    new Deno.Command("chmod", { args: ["-R", "u+rwX", dir] }).outputSync();
    Deno.removeSync(dir, { recursive: true });
  }
}

/**
 * The words that start a program: its source, or, when AUTOMATON_TEST_PROGRAMS names a folder with compiled
 * programs, the one in there.
 */
export function programArgv(program: Program): string[] {
  const folder = Deno.env.get("AUTOMATON_TEST_PROGRAMS");
  if (folder) return [join(folder, program)];
  const script = join(ROOT, "scripts", `${program}.ts`);
  return [Deno.execPath(), "run", "-q", "--no-prompt", `-P=${program}`, script];
}

/** Starts a command with exactly the scratch folder's environment; its streams are piped. */
export function start(
  scratch: Scratch,
  argv: readonly string[],
  options: RunOptions = {},
): Deno.ChildProcess {
  const words = [...options.prefix ?? [], ...argv];
  const env: Record<string, string> = {};
  for (const [name, value] of Object.entries({ ...scratch.env, ...options.env })) {
    if (value !== undefined) env[name] = value;
  }
  return new Deno.Command(words[0]!, {
    args: words.slice(1),
    cwd: options.cwd ?? scratch.project,
    clearEnv: true,
    env,
    stdin: "null",
    stdout: "piped",
    stderr: "piped",
  }).spawn();
}

/** Starts one of the programs. */
export function startProgram(
  scratch: Scratch,
  program: Program,
  args: readonly string[],
  options: RunOptions = {},
): Deno.ChildProcess {
  return start(scratch, [...programArgv(program), ...args], options);
}

/** Waits for a process to end and reads its streams; kills it and throws at the deadline. */
export async function finish(child: Deno.ChildProcess, timeoutMs = 60_000): Promise<Result> {
  let isLate = false;
  const timer = setTimeout(() => {
    isLate = true;
    child.kill("SIGKILL");
  }, timeoutMs);
  const output = await child.output();
  clearTimeout(timer);
  const [stdout, stderr] = [output.stdout, output.stderr].map((b) => new TextDecoder().decode(b));
  if (isLate) throw new Error(`no end after ${timeoutMs} ms\nstdout: ${stdout}\nstderr: ${stderr}`);
  return { code: output.code, signal: output.signal, stdout: stdout!, stderr: stderr! };
}

/** Runs a command to its end. */
export function run(
  scratch: Scratch,
  argv: readonly string[],
  options: RunOptions = {},
): Promise<Result> {
  return finish(start(scratch, argv, options), options.timeoutMs);
}

/** Runs one of the programs to its end. */
export function runProgram(
  scratch: Scratch,
  program: Program,
  args: readonly string[],
  options: RunOptions = {},
): Promise<Result> {
  return run(scratch, [...programArgv(program), ...args], options);
}

/** The last line of stdout as an object; throws with both streams where it is none. */
export function lastJson(result: Result): Record<string, unknown> {
  const line = result.stdout.trimEnd().split("\n").at(-1) ?? "";
  try {
    const value: unknown = JSON.parse(line);
    if (typeof value === "object" && value !== null && !Array.isArray(value)) {
      return value as Record<string, unknown>;
    }
  } catch {
    // Said below, with what was there instead.
  }
  throw new Error(
    `the last line is no JSON object (exit ${result.code})\nstdout: ${result.stdout}\nstderr: ${result.stderr}`,
  );
}

/** Runs git with the scratch folder's environment; throws git's words when it fails. */
export function git(scratch: Scratch, cwd: string, ...args: readonly string[]): string {
  const { code, stdout, stderr } = new Deno.Command("git", {
    args: [...args],
    cwd,
    clearEnv: true,
    env: { ...scratch.env },
    stdin: "null",
  }).outputSync();
  const text = (bytes: Uint8Array) => new TextDecoder().decode(bytes).trim();
  if (code !== 0) throw new Error(`git ${args.join(" ")}: ${text(stderr)}${text(stdout)}`);
  return text(stdout);
}

/** Makes a folder a repository with one commit of the files given (default: one README). */
export function makeRepository(
  scratch: Scratch,
  dir: string = scratch.project,
  files: Readonly<Record<string, string>> = { "README.md": "a project\n" },
): void {
  ensureDirSync(dir);
  git(scratch, dir, "init", "--quiet");
  for (const [path, text] of Object.entries(files)) writeFile(join(dir, path), text);
  git(scratch, dir, "add", "--", ...Object.keys(files));
  git(scratch, dir, "commit", "--quiet", "-m", "start");
}

/** Writes a file and the folders above it. */
export function writeFile(path: string, text: string): void {
  ensureDirSync(dirname(path));
  Deno.writeTextFileSync(path, text);
}

/** Writes an executable script; a fake harness or a stand-in in `scratch.bin`. */
export function writeScript(path: string, text: string): void {
  writeFile(path, text);
  Deno.chmodSync(path, 0o755);
}

/** Reads a JSON file. */
export function readJson(path: string): Record<string, unknown> {
  return JSON.parse(Deno.readTextFileSync(path));
}

/** A task's folder. */
export function taskDir(scratch: Scratch, name: string): string {
  return join(scratch.project, ".automaton", "tasks", name);
}

/** A loop's folder. */
export function loopDir(scratch: Scratch, name: string): string {
  return join(scratch.project, ".automaton", "loops", name);
}

/** The documents that a task has when it has come to a phase by the pipeline. */
export const PHASE_DOCUMENTS: readonly (readonly [phase: string, document: string])[] = [
  ["research", "RESEARCH.md"],
  ["design", "DESIGN.md"],
  ["spec", "SPEC.md"],
  ["implement", "IMPLEMENTATION.md"],
  ["code_review", "CODE_REVIEW.md"],
  ["bug_hunt", "BUG_REPORT.md"],
];

/**
 * Writes a task as the pipeline would have left it: history, approval and documents up to its phase.
 * One in human_intervention came there from `fields.previous_phase` (default implement).
 *
 * @param fields Written over the state's own.
 */
export function writeTask(
  scratch: Scratch,
  name: string,
  phase = "research",
  fields: Readonly<Record<string, unknown>> = {},
): string {
  const order = [...PHASE_DOCUMENTS.map(([each]) => each), "complete"];
  const isWaiting = phase === "human_intervention";
  const reached = isWaiting ? `${fields.previous_phase ?? "implement"}` : phase;
  const index = order.indexOf(reached);
  const passed = [...order.slice(0, index + 1), ...isWaiting ? [phase] : []];
  const parent = taskDir(scratch, phase === "complete" ? "complete" : ".");
  const dir = join(parent, name);
  const at = new Date().toISOString();
  const state = {
    schema_version: 1,
    name,
    title: name,
    phase,
    previous_phase: passed.at(-2) ?? null,
    created_at: at,
    updated_at: at,
    approved_at: index >= order.indexOf("implement") ? at : null,
    claimed_by: null,
    loop: null,
    history: passed.map((to, step) => ({
      at,
      from: passed[step - 1] ?? null,
      to,
      by: "person",
      reason: to === "human_intervention" ? "a question" : null,
    })),
    ...fields,
  };
  writeFile(join(dir, ".state"), JSON.stringify(state));
  for (const [, document] of PHASE_DOCUMENTS.slice(0, Math.max(0, index))) {
    writeFile(join(dir, document), `# ${document} of ${name}\n`);
  }
  return dir;
}

/**
 * Writes a loop: `loop.json` and `.state.loop`, as `--create-loop` would with these contents.
 *
 * @param config loop.json but for its name.
 * @param state Written over a new loop's state.
 */
export function writeLoop(
  scratch: Scratch,
  name: string,
  config: Readonly<Record<string, unknown>> = {},
  state: Readonly<Record<string, unknown>> = {},
): string {
  const dir = loopDir(scratch, name);
  writeFile(join(dir, "loop.json"), JSON.stringify({ name, ...config }));
  const fields = {
    schema_version: 1,
    name,
    status: "running",
    halt_reason: null,
    iteration_count: 0,
    resumed_count: 0,
    last_tick_at: "1970-01-01T00:00:00Z",
    last_verdict: null,
    score_history: [],
    current_task: null,
    worktree_branch: null,
    worktree_path: null,
    ...state,
  };
  writeFile(join(dir, ".state.loop"), JSON.stringify(fields));
  return dir;
}

/** The lines of a loop's `.state.log` as objects, oldest first; none where there is no log. */
export function readLog(scratch: Scratch, name: string): Record<string, unknown>[] {
  try {
    const text = Deno.readTextFileSync(join(loopDir(scratch, name), ".state.log"));
    return text.trimEnd().split("\n").filter((line) => line !== "").map((line) => JSON.parse(line));
  } catch (error) {
    if (error instanceof Deno.errors.NotFound) return [];
    throw error;
  }
}

/**
 * Holds a kernel lock as another process would, until it is disposed of.
 *
 * @param note What the holder has written into the file, as a tick does.
 */
export function holdLock(path: string, note: Readonly<Record<string, unknown>> = {}): Disposable {
  ensureDirSync(dirname(path));
  const file = Deno.openSync(path, { read: true, write: true, create: true });
  file.lockSync(true);
  if (Object.keys(note).length > 0) Deno.writeTextFileSync(path, JSON.stringify(note));
  return { [Symbol.dispose]: () => file.close() };
}

/** Every file below a folder with its content (links: where they lead), to compare before and after. */
export function snapshot(dir: string, skip: readonly string[] = []): Record<string, string> {
  const found: Record<string, string> = {};
  const visit = (path: string, prefix: string): void => {
    for (const entry of Deno.readDirSync(path)) {
      const name = prefix + entry.name;
      if (skip.includes(name)) continue;
      const full = join(path, entry.name);
      if (entry.isSymlink) found[name] = `-> ${Deno.readLinkSync(full)}`;
      else if (entry.isDirectory) visit(full, `${name}/`);
      else if (entry.isFile) found[name] = Deno.readTextFileSync(full);
    }
  };
  visit(dir, "");
  return found;
}

/**
 * Looks again and again until a probe answers something else than null, undefined or false.
 *
 * @param what What is waited for, for the message at the deadline.
 * @param describe The last state seen, for the same message.
 */
export async function poll<T>(
  what: string,
  probe: () => T | null | undefined | false | Promise<T | null | undefined | false>,
  { timeoutMs = 20_000, describe = () => "" }: { timeoutMs?: number; describe?: () => string } = {},
): Promise<T> {
  const deadline = Date.now() + timeoutMs;
  while (true) {
    const seen = await probe();
    if (seen !== null && seen !== undefined && seen !== false) return seen;
    if (Date.now() > deadline) throw new Error(`no ${what} in ${timeoutMs} ms; ${describe()}`);
    await new Promise((wake) => setTimeout(wake, 20));
  }
}

/** True while a process runs; one that has ended and waits for its parent does not. */
export function isAlive(pid: number): boolean {
  const script = 'kill -0 "$1" 2>/dev/null && ! grep -q "^State:.Z" "/proc/$1/status" 2>/dev/null';
  return new Deno.Command("sh", { args: ["-c", script, "sh", `${pid}`] }).outputSync().success;
}
