/**
 * A machine that fails: no room, no permission, no file handles, a clock that jumps, a slow disk. A tick
 * may then do nothing, but it ends, says why, loses nothing, and the next one works once all is well.
 */
import { join } from "@std/path";
import { git, loopDir, runProgram, type Scratch } from "../helpers.ts";
import {
  LOOP,
  type LoopPlan,
  makeLoopScratch,
  readState,
  tick,
  type TickResult,
  worktreeOf,
} from "../runner_support.ts";
import {
  awaitNoneLiving,
  IS_FULL,
  killNow,
  listHeldLocks,
  listSetBacks,
  Random,
  readMemory,
  Tally,
} from "./support.ts";

function tryCommand(argv: readonly string[]): string | null {
  try {
    const { success, stdout } = new Deno.Command(argv[0]!, { args: argv.slice(1) }).outputSync();
    return success ? new TextDecoder().decode(stdout).trim() : null;
  } catch {
    return null; // It is not installed here.
  }
}

const isLinux = Deno.build.os === "linux";
const isRoot = isLinux && Deno.uid() === 0;
const canMount = isRoot && tryCommand(["unshare", "--mount", "true"]) !== null;
const canLimit = isLinux && tryCommand(["prlimit", "--nofile=100", "true"]) !== null;
const canTrace = isLinux && tryCommand(["strace", "-qq", "-o", "/dev/null", "true"]) !== null;
const canFake = isLinux && tryCommand(["faketime", "-f", "+1d", "true"]) !== null;

/** What a tick under a fault came to. */
interface Trial {
  readonly scratch: Scratch;
  /** Lets the fault act on one tick, and takes it away again. */
  readonly suffer: () => Promise<TickResult | null>;
  /** Whether the tick has to do its work all the same. */
  readonly mustWork?: boolean;
  /** Why, and in which words, the tick has to refuse. */
  readonly refusal?: { readonly reason: string; readonly words: RegExp };
}

/** Runs a tick under a fault and one without it, and looks for what was lost. */
async function endure(tally: Tally, name: string, trial: Trial): Promise<void> {
  const { scratch } = trial;
  const lose = (loss: Parameters<Tally["lose"]>[0], what: string) =>
    tally.lose(loss, `${name}: ${what}`);
  try {
    const before = readMemory(scratch);
    const suffered = await trial.suffer();
    if (suffered !== null) tally.tried++;
    const after = readMemory(scratch);
    for (const problem of listSetBacks(before, after)) lose("states lost", problem);
    const count = after.loops.get(LOOP)!.iteration_count - before.loops.get(LOOP)!.iteration_count;
    if (suffered !== null) {
      const { code, json } = suffered;
      const isDone = !json.skipped && json.verdict !== null;
      if (code !== 0) lose("other", `exit code ${code}: ${suffered.stderr}`);
      if (!isDone && !json.message) {
        lose("other", `a tick that failed without words: ${json.reason}`);
      }
      if (json.iteration_count !== null && json.reason === null && count !== 1) {
        lose("states lost", `it said that it was done, and ${count} ticks were counted`);
      }
      const { refusal } = trial;
      if (refusal !== undefined) {
        const isRefused = json.reason === refusal.reason && refusal.words.test(json.message ?? "");
        if (!isRefused) lose("other", `refused otherwise: ${json.reason}: ${json.message}`);
      }
      if (trial.mustWork && !isDone) lose("other", `no tick: ${json.reason}: ${json.message}`);
    }
    if (after.loops.get(LOOP)!.status === "halted") await approve(scratch);
    for (const lock of listHeldLocks(scratch)) lose("stuck locks", lock);
    const { json } = await tick(scratch);
    if (json.skipped || json.verdict === null) {
      lose("other", `the next tick did not run: ${json.reason}: ${json.message}`);
    }
    for (const problem of listSetBacks(after, readMemory(scratch))) lose("states lost", problem);
    for (const { pid, command } of await awaitNoneLiving(scratch)) {
      lose("processes left", command);
      killNow(pid);
    }
  } catch (error) {
    lose("other", `${error}`);
  }
}

/** A person lets a halted loop go on. */
async function approve(scratch: Scratch): Promise<void> {
  await runProgram(scratch, "status", ["--approve", "--loop", LOOP]);
}

/** A loop that never comes to an end: its verifier passes nothing. A trial may give it other scripts. */
const ENDLESS: LoopPlan = {
  implement: 'eval "${DO_implement-echo worked >>work.txt}"',
  verify: 'eval "${DO_verify-verdict false 0.5}"',
  config: {
    brakes: { max_iterations: 1000, score_plateau_window: 500, max_consecutive_failures: 1000 },
    blast_radius: { commit: "always" },
  },
};

function faultTest(kind: string, canRun: boolean, fn: (tally: Tally) => Promise<void>): void {
  Deno.test({
    name: `${kind}: nothing is lost`,
    ignore: !canRun,
    fn: async () => {
      const tally = new Tally(kind);
      await fn(tally);
      tally.close();
    },
  });
}

/** Mounts a small file system over `.automaton` of a new project, which is made again in it. */
function makeSmallDisk(sizeKib: number): Scratch & { unmount(): void } {
  const scratch = makeLoopScratch(ENDLESS);
  const automaton = join(scratch.project, ".automaton");
  const aside = join(scratch.dir, "aside");
  Deno.renameSync(automaton, aside);
  Deno.mkdirSync(automaton);
  const size = `size=${sizeKib}k`;
  if (tryCommand(["mount", "-t", "tmpfs", "-o", size, "tmpfs", automaton]) === null) {
    throw new Error("cannot mount a tmpfs");
  }
  const unmount = () => void tryCommand(["umount", "--lazy", automaton]);
  tryCommand(["cp", "-a", `${aside}/.`, automaton]);
  return {
    ...scratch,
    unmount,
    [Symbol.dispose]: () => {
      unmount();
      scratch[Symbol.dispose]();
    },
  };
}

/** Takes all room but some away, until it is given back. */
function fillDisk(scratch: Scratch, leaveBytes: number): () => void {
  const path = join(scratch.project, ".automaton", "ballast");
  const file = Deno.openSync(path, { write: true, create: true });
  const block = new Uint8Array(4096);
  let size = 0;
  try {
    while (true) size += file.writeSync(block);
  } catch {
    // Full.
  }
  file.truncateSync(Math.max(0, size - leaveBytes));
  file.close();
  return () => Deno.removeSync(path);
}

/** Commands of people, and the words in which a disk that takes nothing is told of. */
const COMMANDS: readonly (readonly string[])[] = [
  ["--approve", "--loop", LOOP],
  ["--pause-loop", LOOP],
  ["--transition", "design", "--task", "fix-it", "--reason", "x"],
];

/** Runs a command that writes where nothing can be written: it says so, and changes nothing. */
async function askInVain(
  tally: Tally,
  name: string,
  { scratch, args, words }: { scratch: Scratch; args: readonly string[]; words: RegExp },
): Promise<void> {
  tally.tried++;
  const before = readMemory(scratch);
  const { code, stderr } = await runProgram(scratch, "status", args);
  const lose = (loss: Parameters<Tally["lose"]>[0], what: string) =>
    tally.lose(loss, `${name}, ${args[0]}: ${what}`);
  if (code === 0 || !words.test(stderr)) lose("other", `exit code ${code}: ${stderr}`);
  if (/\n\s+at /.test(stderr)) lose("other", `not in clear: ${stderr}`);
  for (const problem of listSetBacks(before, readMemory(scratch))) lose("states lost", problem);
}

faultTest("a full disk", canMount, async (tally) => {
  const random = new Random("full disk");
  const pages = [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32];
  for (const page of IS_FULL ? pages : random.shuffle(pages).slice(0, 2)) {
    using scratch = makeSmallDisk(3000);
    await tick(scratch); // The worktree is there: the disk is full at any later step.
    await endure(tally, `${page} pages left before the tick`, {
      scratch,
      suffer: async () => {
        const free = fillDisk(scratch, page * 4096);
        const result = await tick(scratch);
        free();
        return result;
      },
    });
  }
  {
    using scratch = makeSmallDisk(3000);
    await tick(scratch);
    for (const args of [...COMMANDS].reverse()) {
      // An approval has nothing to write where nothing is halted.
      const halt = ["--halt-loop", LOOP, "--reason", "human_intervention"];
      if (args[0] === "--approve") await runProgram(scratch, "status", halt);
      const free = fillDisk(scratch, 0);
      await askInVain(tally, "a full disk", { scratch, args, words: /no space left/i });
      free();
    }
  }
  for (const role of IS_FULL ? ["implement", "verify"] as const : ["verify"] as const) {
    for (const left of IS_FULL ? [0, 1, 2, 3, 4] : [random.below(4)]) {
      using scratch = makeSmallDisk(3000);
      await tick(scratch);
      await endure(tally, `the ${role} session fills the disk but for ${left} pages`, {
        scratch,
        suffer: async () => {
          const ballast = join(scratch.project, ".automaton", "ballast");
          const fill = `dd if=/dev/zero of='${ballast}' bs=4096 2>/dev/null
            truncate -s -${left * 4096} '${ballast}'
            ${role === "verify" ? "verdict true 1" : "echo done"}`;
          const result = await tick(scratch, [], { env: { [`DO_${role}`]: fill } });
          try {
            Deno.removeSync(ballast);
          } catch {
            // The session did not come so far.
          }
          return result;
        },
      });
    }
  }
});

/** Mounts a folder over itself, so that it can be made read-only; returns what takes that away. */
function mountItself(path: string): () => void {
  if (tryCommand(["mount", "--bind", path, path]) === null) throw new Error(`cannot bind ${path}`);
  return () => void tryCommand(["umount", "--lazy", path]);
}

faultTest("a read-only file system", canMount, async (tally) => {
  const places = [
    [".automaton", "gate_failed"],
    [".git", null],
    [".", "gate_failed"],
  ] as const;
  const chosen = IS_FULL ? places : [new Random("read-only").pick(places)];
  for (const [place, reason] of chosen) {
    using scratch = makeLoopScratch(ENDLESS);
    await tick(scratch);
    const path = join(scratch.project, place);
    const unmount = mountItself(path);
    try {
      await endure(tally, `${place} is read-only for a tick`, {
        scratch,
        ...(reason === null ? {} : { refusal: { reason, words: /read-only file system/i } }),
        suffer: async () => {
          tryCommand(["mount", "-o", "remount,bind,ro", path]);
          const result = await tick(scratch);
          const told = `${result.json.message} ${result.json.warnings}`;
          tally.check(/read-only file system/i.test(told), "other", `${place}: not told: ${told}`);
          if (place !== ".git") {
            const words = /read-only file system/i;
            for (const args of COMMANDS) {
              await askInVain(tally, `${place} is read-only`, { scratch, args, words });
            }
          }
          tryCommand(["mount", "-o", "remount,bind,rw", path]);
          return result;
        },
      });
    } finally {
      unmount();
    }
  }
});

faultTest("no permission", isRoot, async (tally) => {
  // Where a tick can do its work it does; where it cannot, its words name the place.
  const places: readonly (readonly [place: string, mode: number, refusal: Trial["refusal"]])[] = [
    [".state.loop", 0o000, { reason: "gate_failed", words: /\.state\.loop".*denied/ }],
    [".state.loop", 0o400, undefined],
    [".state.loop.bak", 0o000, undefined],
    [".state.lock", 0o000, { reason: "gate_failed", words: /denied.*\.state\.lock/ }],
    [".state.log", 0o400, undefined],
    ["loop.json", 0o000, { reason: "gate_failed", words: /loop\.json".*denied/ }],
    ["outputs", 0o500, { reason: "gate_failed", words: /denied.*outputs/ }],
    ["outputs", 0o000, { reason: "gate_failed", words: /denied.*outputs/ }],
    ["worktree", 0o500, undefined],
    ["worktree", 0o000, { reason: "worktree_failed", words: /denied/ }],
    ["../../tasks", 0o500, undefined],
    ["../../tasks", 0o000, { reason: "halted", words: /human_intervention/ }],
    ["../../tasks/fix-it", 0o500, undefined],
    ["../../tasks/fix-it/.state", 0o000, { reason: "halted", words: /human_intervention/ }],
    ["../../../.git", 0o500, undefined],
    ["../../../.git/objects", 0o500, undefined],
    ["../../../.git/index", 0o000, undefined],
    [".", 0o500, { reason: "gate_failed", words: /denied.*loops\/night/ }],
    [".", 0o000, { reason: "gate_failed", words: /denied/ }],
  ];
  const chosen = new Random("permission").shuffle(places).slice(0, IS_FULL ? places.length : 2);
  for (const [place, mode, refusal] of chosen) {
    using scratch = makeLoopScratch(ENDLESS);
    await tick(scratch);
    tryCommand(["chown", "-R", "nobody", scratch.dir]);
    const git = {
      GIT_CONFIG_COUNT: "1",
      GIT_CONFIG_KEY_0: "safe.directory",
      GIT_CONFIG_VALUE_0: "*",
    };
    const path = join(loopDir(scratch, LOOP), place);
    await endure(tally, `${place} has mode ${mode.toString(8)}`, {
      scratch: { ...scratch, env: { ...scratch.env, ...git } },
      ...(refusal === undefined ? { mustWork: true } : { refusal }),
      suffer: async () => {
        const old = Deno.statSync(path).mode! & 0o777;
        Deno.chmodSync(path, mode);
        const prefix = ["setpriv", "--reuid=nobody", "--clear-groups"];
        const result = await tick(scratch, [], { prefix, env: git });
        Deno.chmodSync(path, old);
        return result;
      },
    });
  }
});

faultTest("too many open files", canLimit, async (tally) => {
  using scratch = makeLoopScratch(ENDLESS);
  await tick(scratch);
  const limits = [18, 20, 22, 24, 26, 28];
  const chosen = new Random("open files").shuffle(limits).slice(0, IS_FULL ? limits.length : 2);
  for (const limit of chosen) {
    await endure(tally, `${limit} open files`, {
      scratch,
      suffer: async () => {
        try {
          return await tick(scratch, [], { prefix: ["prlimit", `--nofile=${limit}`] });
        } catch (error) {
          // Deno itself did not start: nothing to hold the program to.
          const isDenos = /os error 24|panicked/.test(`${error}`) &&
            !/loop-runner:/.test(`${error}`);
          if (!isDenos) throw error;
          return null;
        }
      },
    });
  }
});

faultTest("a log that cannot be written", isLinux, async (tally) => {
  for (const kind of IS_FULL ? ["full", "folder", "dangling"] : ["full"]) {
    using scratch = makeLoopScratch(ENDLESS);
    const log = join(loopDir(scratch, LOOP), ".state.log");
    await endure(tally, kind, {
      scratch,
      mustWork: true,
      suffer: async () => {
        if (kind === "folder") Deno.mkdirSync(log);
        else Deno.symlinkSync(kind === "full" ? "/dev/full" : "/nowhere/at/all", log);
        const result = await tick(scratch);
        if (!/Cannot write the log/.test(`${result.json.warnings}`)) {
          tally.lose("other", `${kind}: no warning: ${result.json.warnings}`);
        }
        Deno.removeSync(log);
        return result;
      },
    });
  }
});

faultTest("outputs deleted in a tick", isLinux, async (tally) => {
  for (const role of ["implement", "verify"] as const) {
    const outputs = '"$AUTOMATON_PROJECT/.automaton/loops/$AUTOMATON_LOOP/outputs"';
    const rest = role === "verify" ? "verdict false 0.5" : "echo worked >>work.txt";
    using scratch = makeLoopScratch(ENDLESS);
    const env = { [`DO_${role}`]: `rm -rf ${outputs}; ${rest}` };
    await endure(tally, role, { scratch, suffer: () => tick(scratch, [], { env }) });
  }
});

faultTest("a slow disk", IS_FULL && canTrace, async (tally) => {
  using scratch = makeLoopScratch(ENDLESS);
  const delay = "--inject=fsync,fdatasync,rename,renameat2:delay_enter=150ms";
  const trace = [
    "strace",
    "-f",
    "-qq",
    "-o",
    "/dev/null",
    "--trace=fsync,fdatasync,rename,renameat2",
  ];
  for (let time = 0; time < (IS_FULL ? 3 : 1); time++) {
    await endure(tally, "each sync and rename is late", {
      scratch,
      mustWork: true,
      suffer: () => tick(scratch, [], { prefix: [...trace, delay], timeoutMs: 300_000 }),
    });
  }
});

/** The tick was saved at the time of the clock that jumped, by days: else nothing was tried. */
function checkClock(tally: Tally, name: string, scratch: Scratch, jump: string): void {
  const at = Date.parse(`${readState(scratch).last_tick_at}`);
  const days = Math.round((at - Date.now()) / 86_400_000);
  tally.check(days === Number(jump.slice(0, -1)), "other", `${name}: the clock moved ${days} days`);
}

faultTest("a clock that jumps", canFake, async (tally) => {
  const jumps = ["-1d", "+365d", "-1d", "+1d", "-365d"];
  for (const jump of IS_FULL ? jumps : [new Random("clock").pick(jumps)]) {
    using scratch = makeLoopScratch(ENDLESS);
    await tick(scratch);
    await endure(tally, `between two ticks by ${jump}`, {
      scratch,
      mustWork: true,
      suffer: async () => {
        const result = await tick(scratch, [], { prefix: ["faketime", "-f", jump] });
        checkClock(tally, `between two ticks by ${jump}`, scratch, jump);
        return result;
      },
    });
    // Within a tick: the session itself moves the clock of all that read this file.
    const clock = join(scratch.dir, "clock");
    Deno.writeTextFileSync(clock, "+0d");
    const library = tryCommand(["sh", "-c", "ls /usr/lib/*/faketime/libfaketime.so.1 | head -n 1"]);
    const env = {
      LD_PRELOAD: library ?? "",
      FAKETIME_TIMESTAMP_FILE: clock,
      FAKETIME_NO_CACHE: "1",
      FAKETIME_DONT_FAKE_MONOTONIC: "1",
      DONT_FAKE_MONOTONIC: "1",
      DO_implement: `echo '${jump}' >'${clock}'; sleep 1; echo more >>work.txt`,
    };
    if (library === null) tally.lose("other", "no libfaketime");
    using jumping = makeLoopScratch(ENDLESS);
    await endure(tally, `within a tick by ${jump}`, {
      scratch: jumping,
      mustWork: true,
      suffer: async () => {
        const result = await tick(jumping, [], { env });
        checkClock(tally, `within a tick by ${jump}`, jumping, jump);
        const negative = Object.values(result.json.durations_ms).some((ms) => ms < 0);
        if (negative) tally.lose("other", `negative times: ${JSON.stringify(result.json)}`);
        return result;
      },
    });
  }
  // New York's clocks went forward on 8 March 2026 at 07:00 UTC and back on 1 November at 06:00 UTC.
  for (const time of ["2026-03-08 06:59:58", "2026-11-01 05:59:58"].slice(0, IS_FULL ? 2 : 1)) {
    using scratch = makeLoopScratch(ENDLESS);
    const prefix = ["env", "TZ=UTC", "faketime", "-f", `@${time}`, "env", "TZ=America/New_York"];
    await endure(tally, `daylight saving at ${time}`, {
      scratch,
      mustWork: true,
      suffer: () => tick(scratch, [], { prefix }),
    });
  }
});

faultTest("a stale lock of git", isLinux, async (tally) => {
  for (const name of ["index.lock", "HEAD.lock"]) {
    using scratch = makeLoopScratch(ENDLESS);
    await tick(scratch);
    const path = git(scratch, worktreeOf(scratch), "rev-parse", "--git-path", name);
    Deno.writeTextFileSync(path, "");
    const hourAgo = new Date(Date.now() - 3_600_000);
    Deno.utimeSync(path, hourAgo, hourAgo);
    await endure(tally, name, { scratch, mustWork: true, suffer: () => tick(scratch) });
    const last = git(scratch, worktreeOf(scratch), "log", "-1", "--format=%s");
    const { iteration_count } = readState(scratch);
    if (!last.includes(`tick ${iteration_count},`)) {
      tally.lose("other", `${name}: nothing was committed in tick ${iteration_count}: ${last}`);
    }
  }
});
