/** install.sh: what it makes, on which machines, that it makes it once, and that it all goes away again. */
import {
  assert,
  assertEquals,
  assertMatch,
  assertNotEquals,
  assertStringIncludes,
} from "@std/assert";
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
  copyCheckout,
  fakeCron,
  gitStatus,
  HAS_SH,
  IS_ROOT,
  isInstalled,
  LAUNCHERS,
  makeCheckout,
  makePath,
  names,
  programIdentities,
  runSh,
  SHELLS,
} from "./install_support.ts";

const PROGRAMS = ["loop-runner", "status", "vram-detect"];
const LOOP = ".automaton/loops/self-improvement";
/** A user id that nobody has. */
const ORDINARY = "64999";
const AS_ORDINARY = ["setpriv", `--reuid=${ORDINARY}`, `--regid=${ORDINARY}`, "--clear-groups"];
/** Of a Deno cache, and of a folder with a lock: what a second run may touch. */
const CACHES = [".deno", ".git"];

function testInstall(
  name: string,
  fn: (scratch: Scratch) => Promise<void>,
  ignore = false,
): void {
  Deno.test({
    name: `install.sh ${name}`,
    ignore: ignore || !HAS_SH,
    async fn() {
      using scratch = makeScratch();
      await fn(scratch);
    },
  });
}

/** Installs, without a loop unless told otherwise; requires success. */
async function install(
  scratch: Scratch,
  checkout: string,
  args: readonly string[] = ["--no-loop"],
  options: RunOptions = {},
): Promise<Result> {
  const result = await runSh(scratch, join(checkout, "install.sh"), args, options);
  assertEquals(result.code, 0, `${result.stdout}${result.stderr}`);
  return result;
}

/** Requires that install.sh refuses: exit code, a message and what to do next. */
async function refuse(
  scratch: Scratch,
  checkout: string,
  args: readonly string[],
  [code, message, hint]: readonly [code: number, message: string, hint: string],
  options: RunOptions = {},
): Promise<Result> {
  const result = await runSh(scratch, join(checkout, "install.sh"), args, options);
  const shown = `${args.join(" ")}\n${result.stdout}${result.stderr}`;
  assertEquals(result.code, code, shown);
  assertEquals(result.stdout, "", shown);
  assertStringIncludes(result.stderr, `install: ${message}`, shown);
  assertStringIncludes(result.stderr, `hint: ${hint}`, shown);
  return result;
}

function program(
  scratch: Scratch,
  checkout: string,
  name: string,
  args: readonly string[],
  options: RunOptions = {},
): Promise<Result> {
  return run(scratch, [join(checkout, "bin", name), ...args], { cwd: "/", ...options });
}

// --- From clone to nothing ---

testInstall(
  "sets up a clone of an ordinary user, once, and takes everything away again",
  async (scratch) => {
    const table = fakeCron(scratch);
    Deno.writeTextFileSync(table, "# mine\n5 4 * * * true\n");
    const home = join(scratch.dir, "a home");
    const checkout = join(home, ".automaton");
    const source = makeCheckout(scratch, "upstream");
    git(scratch, scratch.dir, "clone", "--quiet", source, checkout);
    const { DENO_DIR: _, ...own } = scratch.env;
    const prefix = IS_ROOT ? ["env", "-i", ...AS_ORDINARY] : ["env", "-i"];
    if (IS_ROOT) await run(scratch, ["chown", "-R", ORDINARY, home]);
    await run(scratch, ["chmod", "755", scratch.dir]);
    const environment = Object.entries({ ...own, ...LAUNCHERS, HOME: home });
    const words = environment.map(([name, value]) => `${name}=${value}`);
    const asUser = async (...argv: string[]) => {
      const result = await run(scratch, [
        ...prefix.slice(0, 2),
        ...words,
        ...prefix.slice(2),
        ...argv,
      ], {
        cwd: checkout,
      });
      assertEquals(result.code, 0, `${argv.join(" ")}\n${result.stdout}${result.stderr}`);
      return result;
    };

    await asUser("./install.sh", "--no-schedule");
    assertEquals(names(join(checkout, "bin")), PROGRAMS);
    const doctor = lastJson(await asUser("bin/status", "--doctor", "--json"));
    assertEquals(doctor.ok, true, JSON.stringify(doctor));
    const tick = lastJson(
      await asUser("bin/loop-runner", "--mode", "tick", "--loop", "self-improvement", "--json"),
    );
    assertEquals(
      [tick.ok, tick.skipped, tick.reason],
      [true, true, "no_work"],
      JSON.stringify(tick),
    );

    const before = snapshot(checkout, CACHES);
    const programs = programIdentities(checkout);
    await asUser("./install.sh", "--no-schedule");
    assertEquals(snapshot(checkout, CACHES), before);
    assertEquals(programIdentities(checkout), programs);

    await asUser("./install.sh", "--uninstall");
    assertEquals((await asUser("git", "status", "--porcelain")).stdout, "");
    assertEquals(Deno.readTextFileSync(table), "# mine\n5 4 * * * true\n");
    assertEquals(names(home), [".automaton"]);
    assertEquals(
      names(checkout).filter((name) => ![".git", ".automaton"].includes(name)),
      names(source).filter((name) => ![".git", "vendor"].includes(name)),
    );
    assert(existsSync(join(checkout, LOOP, ".state.loop")), "the loop of the person is gone");
    const again = await asUser("./install.sh", "--uninstall");
    assertStringIncludes(again.stderr, "nothing to uninstall");
  },
);

testInstall("names in its receipt what it made, and nothing else", async (scratch) => {
  const checkout = makeCheckout(scratch);
  await install(scratch, checkout, ["--no-schedule"]);
  const { paths, schedules, form, framework, schema_version } = readJson(
    join(checkout, ".install-receipt.json"),
  );
  assertEquals([schema_version, form, framework], [1, "launchers", checkout]);
  assertEquals(schedules, []);
  const made = names(checkout).filter((name) =>
    !names(scratch.project).includes(name) && !existsSync(join(checkout, ".git", name)) &&
    git(scratch, checkout, "ls-files", "--", name) === ""
  );
  assertEquals(
    [...new Set((paths as string[]).map((path) => path.replace(/\/.*/, "")))].sort(),
    [...made, ".automaton"].filter((name) => ![".git", ".install-receipt.json"].includes(name))
      .sort(),
  );
});

for (const shell of SHELLS) {
  testInstall(
    `does the same under ${shell.join(" ")}, which must be installed`,
    async (scratch) => {
      const checkout = makeCheckout(scratch, `it's a "check%20out" é $HOME \\n`);
      const script = join(checkout, "install.sh");
      const { code, stderr } = await runSh(scratch, script, ["--no-schedule"], { shell });
      assertEquals(code, 0, stderr);
      const { stdout } = await program(scratch, checkout, "status", ["--loop-list"], {
        cwd: checkout,
      });
      assertStringIncludes(stdout, "self-improvement");
      const end = await runSh(scratch, script, ["--uninstall", "--purge"], { shell });
      assertEquals(end.code, 0, end.stderr);
      assertEquals(gitStatus(scratch, checkout), "");
      assertEquals(names(checkout).filter((name) => name.startsWith(".")), [".git", ".gitignore"]);
    },
    !isInstalled(shell[0]!),
  );
}

testInstall("works when it is called through links", async (scratch) => {
  const checkout = makeCheckout(scratch);
  Deno.symlinkSync(join(checkout, "install.sh"), join(scratch.bin, "one"));
  Deno.symlinkSync("one", join(scratch.bin, "two"));
  Deno.symlinkSync(checkout, join(scratch.dir, "linked"));
  await runSh(scratch, join(scratch.bin, "two"), ["--no-schedule"]);
  assertEquals(names(join(checkout, "bin")), PROGRAMS);
  await install(scratch, join(scratch.dir, "linked"), ["--uninstall"]);
  assert(!existsSync(join(checkout, "bin")));
});

// --- Machines that lack something ---

/** What every Unix has. */
const BASE_TOOLS =
  ("awk basename cat chmod cksum cmp cp cut date dirname env find grep head id ls mkdir mv " +
    "readlink rm rmdir sed sh sleep sort tail tr uname").split(" ");

testInstall("needs neither npm, curl, git nor bash where Deno is", async (scratch) => {
  const checkout = makeCheckout(scratch);
  const PATH = makePath(scratch, BASE_TOOLS);
  const { stderr } = await install(scratch, checkout, ["--no-loop"], { env: { PATH } });
  assertStringIncludes(stderr, "git was not found");
  await install(scratch, checkout, ["--uninstall"], { env: { PATH } });
  assertEquals(gitStatus(scratch, checkout), "");
});

testInstall("says what to do where there is no Deno and no way to get one", async (scratch) => {
  const checkout = makeCheckout(scratch);
  const env = { PATH: makePath(scratch, [...BASE_TOOLS, "ldd"]), AUTOMATON_DENO: undefined };
  await refuse(scratch, checkout, [], [1, "Cannot make Deno ready", "name a Deno 2.6 or newer"], {
    env,
  });
  await install(scratch, checkout, ["--uninstall"], { env });
  assertEquals(gitStatus(scratch, checkout), "");
  assert(!existsSync(join(checkout, ".deno")));
});

testInstall("passes over an old Deno on PATH", async (scratch) => {
  const checkout = makeCheckout(scratch);
  writeScript(join(scratch.bin, "deno"), "#!/bin/sh\necho 'deno 2.5.9 (stable)'\n");
  const good = join(scratch.home, ".deno", "bin", "deno");
  writeScript(good, `#!/bin/sh\nexec '${Deno.execPath()}' "$@"\n`);
  const { stderr } = await install(scratch, checkout, ["--no-loop"], {
    env: { AUTOMATON_DENO: undefined },
  });
  assertStringIncludes(stderr, "version 2.5.9 is older than");
  assertEquals((await program(scratch, checkout, "status", ["--version"])).code, 0);
});

testInstall(
  "writes nothing to HOME, which may be read-only or missing",
  async (scratch) => {
    const checkout = makeCheckout(scratch);
    const home = join(scratch.dir, "read-only home");
    Deno.mkdirSync(home, { mode: 0o555 });
    await run(scratch, ["chown", "-R", ORDINARY, checkout]);
    await run(scratch, ["chmod", "755", scratch.dir]);
    for (const HOME of [home, undefined]) {
      const env = { HOME, DENO_DIR: undefined };
      await install(scratch, checkout, ["--no-loop"], { env, cwd: "/", prefix: AS_ORDINARY });
      const { code, stderr } = await program(scratch, checkout, "status", ["--version"], {
        env,
        prefix: AS_ORDINARY,
      });
      assertEquals(code, 0, stderr);
      await install(scratch, checkout, ["--uninstall"], { env, cwd: "/", prefix: AS_ORDINARY });
    }
    assertEquals(names(home), []);
  },
  !IS_ROOT,
);

testInstall(
  "refuses a checkout that it cannot write to",
  async (scratch) => {
    const checkout = makeCheckout(scratch);
    await run(scratch, ["chmod", "755", scratch.dir]);
    const before = snapshot(checkout);
    await refuse(scratch, checkout, [], [
      1,
      `Cannot write to the checkout "${checkout}"`,
      "run install.sh as its owner",
    ], { prefix: AS_ORDINARY, cwd: "/" });
    assertEquals(snapshot(checkout), before);
  },
  !IS_ROOT,
);

testInstall(
  "refuses a path with a control character, which no schedule could hold",
  async (scratch) => {
    const checkout = makeCheckout(scratch, "two\nlines");
    const before = snapshot(checkout);
    for (const shell of SHELLS.filter(([name]) => isInstalled(name!))) {
      const { code, stderr } = await runSh(scratch, join(checkout, "install.sh"), [], { shell });
      assertEquals(code, 1, stderr);
      assertStringIncludes(
        stderr,
        "Cannot install in a folder with a control character in its path",
      );
    }
    assertEquals(snapshot(checkout), before);
  },
);

testInstall("refuses to install from what is no checkout", async (scratch) => {
  const alone = join(scratch.dir, "alone");
  Deno.mkdirSync(alone);
  Deno.copyFileSync(join(makeCheckout(scratch), "install.sh"), join(alone, "install.sh"));
  await refuse(scratch, alone, [], [1, `Cannot install from "${alone}"`, "clone the repository"]);
});

testInstall("is not for the sessions of a loop", async (scratch) => {
  const checkout = makeCheckout(scratch);
  const before = snapshot(checkout);
  for (const args of [[], ["--uninstall"]]) {
    const { code, stderr } = await runSh(scratch, join(checkout, "install.sh"), args, {
      env: { AUTOMATON_LOOP: "nightly", AUTOMATON_ROLE: "implement" },
    });
    assertEquals(code, 1);
    assertStringIncludes(stderr, 'Cannot run in a session of loop "nightly"');
  }
  assertEquals(snapshot(checkout), before);
});

// --- Command line ---

testInstall("refuses calls that make no sense", async (scratch) => {
  const checkout = makeCheckout(scratch);
  const before = snapshot(checkout);
  const cases: readonly (readonly [readonly string[], string])[] = [
    [["--no-lop"], 'Cannot use option "--no-lop": there is no such option'],
    [["now"], 'Cannot use option "now": there is no such option'],
    [["--prefix"], 'Cannot use option "--prefix": its value is missing'],
    [["--prefix="], 'Cannot use option "--prefix=": there is no such option'],
    [["--context-tokens"], 'Cannot use option "--context-tokens": its value is missing'],
    [["--context-tokens", "lots"], 'Cannot use option "--context-tokens": "lots" is no number'],
    [["--context-tokens=0"], 'Cannot use option "--context-tokens": "0" is no number'],
    [["--context-tokens=-5"], 'Cannot use option "--context-tokens": "-5" is no number'],
    [["--purge"], 'Cannot use option "--purge" without "--uninstall"'],
    [["--uninstall", "--no-loop"], 'Cannot use option "--no-loop" with "--uninstall"'],
    [["--uninstall", "--demo"], 'Cannot use option "--uninstall" with "--demo"'],
    [["--demo", "--dry-run"], 'Cannot use option "--dry-run" with "--demo"'],
  ];
  for (const [args, message] of cases) {
    await refuse(scratch, checkout, args, [2, message, "./install.sh --help"]);
  }
  assertEquals(snapshot(checkout), before);
});

testInstall("--dry-run says what would be done and changes nothing", async (scratch) => {
  const table = fakeCron(scratch);
  const checkout = makeCheckout(scratch);
  const all = () => snapshot(scratch.dir, ["tmp"]);
  const before = all();
  const prefix = join(scratch.dir, "usr");
  const { stdout } = await install(scratch, checkout, [
    "--dry-run",
    `--prefix=${prefix}`,
    "--context-tokens=32000",
  ]);
  for (const part of ["compile", `${prefix}/bin`, "32000", "self-improvement", "3600 seconds"]) {
    assertStringIncludes(stdout, part);
  }
  assertEquals(all(), before);
  await install(scratch, checkout, ["--no-schedule", "--prefix", prefix]);
  const installed = all();
  const end = await install(scratch, checkout, ["--uninstall", "--purge", "--dry-run"]);
  for (const part of ["bin/status", `${prefix}/bin/status`, "vendor", ".automaton, with all"]) {
    assertStringIncludes(end.stdout, `  ${part}`);
  }
  assertEquals(all(), installed);
  assert(!existsSync(table));
});

Deno.test({
  name: "a cut download of install.sh or update.sh runs nothing",
  ignore: !HAS_SH,
  async fn() {
    using scratch = makeScratch();
    const checkout = makeCheckout(scratch);
    const shells = SHELLS.filter(([name]) => isInstalled(name!));
    assert(shells.length > 0);
    const before = snapshot(checkout);
    for (const name of ["install.sh", "update.sh"]) {
      const script = join(checkout, name);
      const whole = Deno.readFileSync(script);
      // The last cut leaves out the brace that closes the script.
      const cuts = [...Array(30).keys()].map((step) => Math.floor(whole.length * step / 30));
      const tail = [...Array(30).keys()].map((step) => whole.length - 2 - step);
      for (const [index, end] of [...cuts, ...tail].entries()) {
        Deno.writeFileSync(script, whole.subarray(0, end));
        const shell = shells[index % shells.length]!;
        const { stdout } = await runSh(scratch, script, ["--help"], { shell });
        assertEquals(stdout, "", `${name} cut at ${end} printed something`);
        const { stderr } = await runSh(scratch, script, ["--no-such-option"], { shell });
        assert(!stderr.includes("Cannot"), `${name} cut at ${end} looked at its options`);
      }
      Deno.writeFileSync(script, whole);
    }
    assertEquals(snapshot(checkout), before);
  },
});

// --- Programs ---

testInstall(
  "--require-compile fails where there is no base, and keeps what is there",
  async (scratch) => {
    const checkout = makeCheckout(scratch);
    const message = 'Cannot compile the programs: DENORT_BIN names "/no/denort"';
    await refuse(scratch, checkout, ["--require-compile"], [
      1,
      message,
      "leave out --require-compile",
    ]);
    assert(!existsSync(join(checkout, "bin")));
    const { stderr } = await install(scratch, checkout);
    assertStringIncludes(stderr, "launchers that run their sources, since DENORT_BIN names");
    const before = programIdentities(checkout);
    await refuse(scratch, checkout, ["--require-compile"], [
      1,
      message,
      "leave out --require-compile",
    ]);
    assertEquals(programIdentities(checkout), before);
  },
);

testInstall("makes launchers where compiling fails, and says why", async (scratch) => {
  const checkout = makeCheckout(scratch);
  const compiler = join(scratch.dir, "compiler");
  writeScript(
    compiler,
    `#!/bin/sh
case $1 in
  --version) echo 'deno 2.9.6' ;;
  compile)
    printf 'error: Writing the file\\n\\nCaused by:\\n    0: Setting up\\n    1: no space left\\n' >&2
    printf '\\nStack backtrace:\\n   0: <unknown>\\n' >&2
    exit 1 ;;
esac
`,
  );
  const env = { AUTOMATON_COMPILE_DENO: compiler, DENORT_BIN: compiler };
  const { stderr } = await install(scratch, checkout, ["--no-loop"], { env });
  assertStringIncludes(
    stderr,
    'launchers that run their sources, since "deno compile" failed on loop-runner: no space left\n',
  );
  assertEquals(names(join(checkout, "bin")), PROGRAMS);
});

testInstall("never puts a program in place that does not run", async (scratch) => {
  const checkout = makeCheckout(scratch);
  await install(scratch, checkout);
  const before = programIdentities(checkout);
  writeFile(join(checkout, "scripts", "vram-detect.ts"), "throw new Error('broken');\n");
  const result = await runSh(scratch, join(checkout, "install.sh"), ["--no-schedule"]);
  assertEquals(result.code, 1);
  assertMatch(result.stderr, /install: Cannot start vram-detect: .*broken/);
  assertEquals(programIdentities(checkout), before);
});

/** A compiler that waits, and a way to know that it does. */
function hangingCompiler(scratch: Scratch): { env: Record<string, string>; started: string } {
  const [compiler, started] = [join(scratch.dir, "compiler"), join(scratch.dir, "started")];
  writeScript(
    compiler,
    `#!/bin/sh
case $1 in
  --version) echo 'deno 2.9.6' ;;
  compile) echo half >"$PWD/x"; touch '${started}'; exec sleep 300 ;;
esac
`,
  );
  return { env: { ...LAUNCHERS, AUTOMATON_COMPILE_DENO: compiler, DENORT_BIN: compiler }, started };
}

testInstall("leaves the old programs in place when it is interrupted", async (scratch) => {
  const checkout = makeCheckout(scratch);
  await install(scratch, checkout);
  const before = programIdentities(checkout);
  const { env, started } = hangingCompiler(scratch);
  for (const [signal, code] of [["SIGTERM", 143], ["SIGHUP", 129], ["SIGKILL", 137]] as const) {
    const argv = ["sh", join(checkout, "install.sh"), "--no-schedule"];
    const child = start(scratch, argv, { env });
    await poll("start of the compiler", () => existsSync(started));
    Deno.kill(child.pid, signal);
    const result = await finish(child, 20_000);
    assertEquals(result.code, code, result.stderr);
    Deno.removeSync(started);
    if (signal !== "SIGKILL") {
      assertEquals(programIdentities(checkout), before);
      assert(!existsSync(join(checkout, ".deno", "install.lock")));
    }
  }
  const { stderr } = await install(scratch, checkout);
  assert(!stderr.includes("installing here already"), stderr);
  assertEquals(programIdentities(checkout), before);
});

testInstall("runs once at a time", async (scratch) => {
  const checkout = makeCheckout(scratch);
  const { env, started } = hangingCompiler(scratch);
  const child = start(scratch, ["sh", join(checkout, "install.sh")], { env });
  await poll("start of the compiler", () => existsSync(started));
  const message = `Cannot go on: process ${child.pid} is installing here already`;
  for (const args of [[], ["--uninstall"]]) {
    await refuse(scratch, checkout, args, [1, message, "wait for it to end"]);
  }
  Deno.kill(child.pid, "SIGTERM");
  await finish(child, 20_000);
});

testInstall("makes launchers that behave the same from anywhere", async (scratch) => {
  const checkout = makeCheckout(scratch, `it's a "check%20out" é $HOME \\n`);
  await install(scratch, checkout, ["--no-schedule"]);
  const moved = join(scratch.dir, "moved é");
  Deno.renameSync(checkout, moved);
  Deno.symlinkSync(join(moved, "bin", "status"), join(scratch.bin, "my status"));
  Deno.symlinkSync("my status", join(scratch.bin, "again"));
  const version = `status ${readVersion(moved)}\n`;
  const calls: readonly (readonly [readonly string[], RunOptions])[] = [
    [[join(moved, "bin", "status")], { cwd: "/" }],
    [["env", "-i", join(moved, "bin", "status")], { cwd: "/" }],
    [["./status"], { cwd: join(moved, "bin") }],
    [["bin/status"], { cwd: moved }],
    [["again"], { cwd: scratch.home }],
    [["sh", "status"], { cwd: join(moved, "bin") }],
    [[join(scratch.bin, "my status")], { env: { PATH: undefined } }],
  ];
  for (const [argv, options] of calls) {
    const { stdout, stderr } = await run(scratch, [...argv, "--version"], options);
    assertEquals(stdout, version, `${argv.join(" ")}: ${stderr}`);
  }
  const title = `a "title" with $HOME, \`date\`, 'é' and \\n`;
  const made = await program(scratch, moved, "status", [
    ...["--create-task", "quoted", "--title", title, "--project", scratch.project, "--json"],
  ]);
  assertEquals(made.code, 0, made.stderr);
  const task = readJson(join(scratch.project, ".automaton/tasks/quoted/.state"));
  assertEquals(task.title, title);
  assertEquals((await program(scratch, moved, "status", ["--nonsense"])).code, 2);
  const tick = lastJson(
    await program(scratch, moved, "loop-runner", [
      ...["--mode", "tick", "--loop", "self-improvement", "--project", moved, "--json"],
    ]),
  );
  assertEquals(tick.reason, "no_work", JSON.stringify(tick));
});

function readVersion(checkout: string): string {
  return /^version: (.*)$/m.exec(Deno.readTextFileSync(join(checkout, "config.md")))?.[1] ?? "";
}

testInstall("makes launchers that look for another Deno when theirs is gone", async (scratch) => {
  const checkout = makeCheckout(scratch);
  const deno = join(scratch.dir, "de'no");
  Deno.symlinkSync(Deno.execPath(), deno);
  await install(scratch, checkout, ["--no-loop"], { env: { AUTOMATON_DENO: deno } });
  const version = () => program(scratch, checkout, "status", ["--version"]);
  assertEquals((await version()).code, 0);
  Deno.removeSync(deno);
  const { code, stderr } = await version();
  assertEquals(code, 1);
  assertStringIncludes(
    stderr,
    `status: Cannot start: the Deno of the installation, "${deno}", is gone`,
  );
  assertStringIncludes(stderr, "hint: run install.sh again");
  writeScript(join(scratch.bin, "deno"), "#!/bin/sh\necho 'deno 2.5.9'\n");
  assertEquals((await version()).code, 1, "an old Deno will not do");
  Deno.mkdirSync(join(scratch.home, ".deno/bin"), { recursive: true });
  Deno.symlinkSync(Deno.execPath(), join(scratch.home, ".deno/bin/deno"));
  assertEquals((await version()).code, 0);
});

testInstall("finds a Deno in the checkout also after a move", async (scratch) => {
  const checkout = makeCheckout(scratch);
  Deno.mkdirSync(join(checkout, ".deno/bin"), { recursive: true });
  // A copy is a Deno of its own, as an installed one is; a link would be followed to its target.
  await run(scratch, ["cp", Deno.execPath(), join(checkout, ".deno/bin/deno")]);
  const env = { AUTOMATON_DENO: undefined, PATH: makePath(scratch, BASE_TOOLS) };
  await install(scratch, checkout, ["--no-loop"], { env });
  const moved = join(scratch.dir, "moved");
  Deno.renameSync(checkout, moved);
  const { code, stderr } = await program(scratch, moved, "status", ["--version"], { env });
  assertEquals(code, 0, stderr);
});

// --- Links ---

testInstall("--prefix links the programs, and only removes what it linked", async (scratch) => {
  const checkout = makeCheckout(scratch);
  const prefix = join(scratch.home, "my local");
  const bin = join(prefix, "bin");
  const { stderr } = await install(scratch, checkout, ["--no-loop", "--prefix", prefix]);
  assertStringIncludes(stderr, `hint: add ${bin} to PATH`);
  assertEquals(names(bin), PROGRAMS);
  const PATH = `${bin}:${scratch.env.PATH}`;
  assertEquals((await run(scratch, ["status", "--version"], { env: { PATH } })).code, 0);

  const again = await install(scratch, checkout, [`--prefix=${prefix}`, "--no-loop"], {
    env: { PATH },
  });
  assert(!again.stderr.includes("to PATH"), again.stderr);

  const moved = join(scratch.dir, "moved");
  Deno.renameSync(checkout, moved);
  await install(scratch, moved);
  assertEquals(Deno.readLinkSync(join(bin, "status")), join(moved, "bin", "status"));

  writeFile(join(bin, "mine"), "mine");
  Deno.removeSync(join(bin, "vram-detect"));
  writeFile(join(bin, "vram-detect"), "mine too");
  const end = await install(scratch, moved, ["--uninstall"]);
  assertStringIncludes(end.stderr, `keeping ${join(bin, "vram-detect")}: it is no link of ours`);
  assertEquals(snapshot(bin), { mine: "mine", "vram-detect": "mine too" });
});

testInstall("--prefix leaves no folder behind that it made", async (scratch) => {
  const checkout = makeCheckout(scratch);
  await install(scratch, checkout, ["--no-loop", "--prefix", "local/deep"], {
    cwd: scratch.home,
  });
  assertEquals(names(join(scratch.home, "local/deep/bin")), PROGRAMS);
  await install(scratch, checkout, ["--uninstall"]);
  assertEquals(names(scratch.home), [".gitconfig"]);
});

testInstall("--prefix refuses to replace what is not its own", async (scratch) => {
  const checkout = makeCheckout(scratch);
  const prefix = join(scratch.dir, "usr");
  const link = join(prefix, "bin", "status");
  Deno.mkdirSync(join(prefix, "bin"), { recursive: true });
  const others: readonly (() => void)[] = [
    () => Deno.writeTextFileSync(link, "mine"),
    () => Deno.symlinkSync("/usr/bin/true", link),
    () => Deno.symlinkSync("/nowhere", link),
    () => Deno.mkdirSync(link),
  ];
  for (const make of others) {
    make();
    const before = snapshot(scratch.dir, ["tmp"]);
    await refuse(scratch, checkout, ["--prefix", prefix], [
      1,
      `Cannot link "${link}": another file is there`,
      "move it away",
    ]);
    assertEquals(snapshot(scratch.dir, ["tmp"]), before);
    Deno.removeSync(link);
  }
});

// --- Context ---

testInstall("--context-tokens declares the default model's window", async (scratch) => {
  const checkout = makeCheckout(scratch);
  const models = join(checkout, ".automaton", "models.json");
  const args = (tokens: string) => ["--no-loop", "--context-tokens", tokens];
  const context = async () => {
    const result = await program(scratch, checkout, "vram-detect", ["--json"], { cwd: checkout });
    return lastJson(result).available_context_tokens;
  };
  const { stderr } = await install(scratch, checkout, args("8192"));
  assertStringIncludes(stderr, "loops need 16000 tokens");
  await install(scratch, checkout, args("32768"));
  assertEquals(await context(), 32768);

  const mine = `// my models: { "default": "x" }
{
  "default": "big", // the one
  "conflicts": [["big", "small"]],
  "models": {
    "small": { "context_tokens": 16000, "note": "\\"default\\": }" },
    "big": { "gguf": "/m/{big}.gguf", /* "context_tokens": 1, */ "context_tokens": 20000, },
  },
}
`;
  Deno.writeTextFileSync(models, mine);
  await install(scratch, checkout, args("65536"));
  assertEquals(Deno.readTextFileSync(models), mine.replace("20000", "65536"));
  assertEquals(await context(), 65536);

  for (
    const [text, message] of [["{}", "holds no models"], ['{"models":{}}', "no default model"]]
  ) {
    Deno.writeTextFileSync(models, text!);
    const { stderr } = await refuse(scratch, checkout, args("65536"), [
      1,
      "Cannot use --context-tokens",
      `mend ${models}`,
    ]);
    assertStringIncludes(stderr, message!);
    assertEquals(Deno.readTextFileSync(models), text);
  }
});

// --- Loop and schedule ---

testInstall("schedules the loop and puts the crontab back as it was", async (scratch) => {
  const table = fakeCron(scratch);
  const mine = "# mine, without an end of line\nMAILTO=me\n5 4 * * * true";
  Deno.writeTextFileSync(table, mine);
  const checkout = makeCheckout(scratch);
  const { stdout } = await install(scratch, checkout, []);
  assertStringIncludes(stdout, "self-improvement, on a schedule");
  const line = Deno.readTextFileSync(table).split("\n").find((each) =>
    each.startsWith("0 * * * *")
  );
  assertStringIncludes(line ?? "", join(checkout, LOOP));
  assertEquals(readJson(join(checkout, ".install-receipt.json")).schedules, ["self-improvement"]);

  const installed = Deno.readTextFileSync(table);
  const again = await install(scratch, checkout, []);
  assertStringIncludes(again.stderr, "the loop self-improvement has a schedule already");
  assertEquals(Deno.readTextFileSync(table), installed);

  await install(scratch, checkout, ["--uninstall"]);
  assertEquals(Deno.readTextFileSync(table), mine);
  assert(existsSync(join(checkout, LOOP, "loop.json")));
});

testInstall("schedules anew what lies elsewhere now", async (scratch) => {
  const table = fakeCron(scratch);
  const checkout = makeCheckout(scratch);
  await install(scratch, checkout, []);
  const moved = join(scratch.dir, "moved");
  Deno.renameSync(checkout, moved);
  await install(scratch, moved, []);
  const lines = Deno.readTextFileSync(table).trimEnd().split("\n");
  assertEquals(lines.length, 1, lines.join("\n"));
  assertStringIncludes(lines[0]!, join(moved, LOOP));
  await install(scratch, moved, ["--uninstall"]);
  assertEquals(Deno.readTextFileSync(table), "");
});

testInstall(
  "leaves links and schedules to the checkout that this one is a copy of",
  async (scratch) => {
    const table = fakeCron(scratch);
    const checkout = makeCheckout(scratch);
    const prefix = join(scratch.dir, "usr");
    await install(scratch, checkout, ["--prefix", prefix]);
    const crontab = Deno.readTextFileSync(table);
    const copy = join(scratch.dir, "copy");
    await run(scratch, ["cp", "-R", checkout, copy]);
    const { stderr } = await install(scratch, copy, []);
    assertStringIncludes(stderr, `this is a copy of ${checkout}`);
    await refuse(scratch, copy, ["--prefix", prefix], [1, "Cannot link", "move it away"]);
    await install(scratch, copy, ["--uninstall", "--purge"]);
    assertEquals(Deno.readTextFileSync(table), crontab);
    assertEquals(Deno.readLinkSync(join(prefix, "bin", "status")), join(checkout, "bin", "status"));
    assert(!existsSync(join(copy, "bin")));
    await install(scratch, checkout, ["--uninstall", "--purge"]);
    assertEquals([Deno.readTextFileSync(table), existsSync(prefix)], ["", false]);
  },
);

testInstall("goes on where the scheduler refuses, and says how to try again", async (scratch) => {
  fakeCron(scratch);
  writeScript(
    join(scratch.bin, "crontab"),
    "#!/bin/sh\necho 'You (test) are not allowed to use this program (crontab)' >&2\nexit 1\n",
  );
  const checkout = makeCheckout(scratch);
  const { stdout, stderr } = await install(scratch, checkout, []);
  assertStringIncludes(stderr, "install: the loop self-improvement has no schedule");
  assertMatch(stderr, /hint: .*status' --install-schedule self-improvement --interval 3600/);
  assertStringIncludes(stdout, "self-improvement, only by hand");
  assertEquals(readJson(join(checkout, ".install-receipt.json")).schedules, []);
});

testInstall("keeps a paused loop paused", async (scratch) => {
  const table = fakeCron(scratch);
  const checkout = makeCheckout(scratch);
  await install(scratch, checkout, ["--no-schedule"]);
  const pause = await program(scratch, checkout, "status", [
    ...["--pause-loop", "self-improvement", "--project", checkout],
  ]);
  assertEquals(pause.code, 0, pause.stderr);
  const before = snapshot(join(checkout, LOOP));
  const { stderr } = await install(scratch, checkout, []);
  assertStringIncludes(stderr, "does not run now");
  assertEquals(snapshot(join(checkout, LOOP)), before);
  assert(!existsSync(table));
});

testInstall("--uninstall keeps the programs as long as a schedule calls them", async (scratch) => {
  const table = fakeCron(scratch);
  const checkout = makeCheckout(scratch);
  await install(scratch, checkout, []);
  const crontab = join(scratch.bin, "crontab");
  const works = Deno.readTextFileSync(crontab);
  writeScript(crontab, "#!/bin/sh\necho 'cannot connect' >&2\nexit 1\n");
  await refuse(scratch, checkout, ["--uninstall"], [
    1,
    'Cannot remove the schedule of loop "self-improvement"',
    "run install.sh --uninstall again",
  ]);
  assertEquals(names(join(checkout, "bin")), PROGRAMS);
  writeScript(crontab, works);
  await install(scratch, checkout, ["--uninstall"]);
  assertEquals(Deno.readTextFileSync(table), "");
});

// --- What is a person's own ---

testInstall(
  "--uninstall --purge removes tasks and loops, with their worktrees",
  async (scratch) => {
    const checkout = makeCheckout(scratch);
    await install(scratch, checkout, ["--no-schedule"]);
    const worktree = join(checkout, LOOP, "worktree");
    git(scratch, checkout, "worktree", "add", "-q", worktree, "-b", "loop/self-improvement");
    writeFile(join(worktree, "unsaved"), "work");
    await refuse(scratch, checkout, ["--uninstall", "--purge"], [
      1,
      'Cannot remove loop "self-improvement"',
      "save its work",
    ]);
    assert(existsSync(join(worktree, "unsaved")));
    assertEquals(names(join(checkout, "bin")), PROGRAMS);
    Deno.removeSync(join(worktree, "unsaved"));
    await install(scratch, checkout, ["--uninstall", "--purge"]);
    assert(!existsSync(join(checkout, ".automaton")));
    assertEquals(git(scratch, checkout, "worktree", "list").split("\n").length, 1);
    assertEquals(gitStatus(scratch, checkout), "");
  },
);

testInstall("--uninstall --purge keeps tasks that were there before", async (scratch) => {
  const checkout = makeCheckout(scratch);
  writeFile(join(checkout, ".automaton/tasks/mine/BRIEF.md"), "mine");
  await install(scratch, checkout);
  const { stderr } = await install(scratch, checkout, ["--uninstall", "--purge"]);
  assertStringIncludes(stderr, "keeping .automaton: it was not made by install.sh here");
  assertEquals(Deno.readTextFileSync(join(checkout, ".automaton/tasks/mine/BRIEF.md")), "mine");
});

testInstall("--uninstall touches no path that install.sh never makes", async (scratch) => {
  const checkout = makeCheckout(scratch);
  await install(scratch, checkout);
  const precious = join(scratch.dir, "precious");
  writeFile(precious, "mine");
  const receipt = join(checkout, ".install-receipt.json");
  const paths = [
    "scripts",
    "bin/../scripts/status.ts",
    "../precious",
    precious,
    `${scratch.home}/`,
  ];
  const lines = paths.map((path) => `    ${JSON.stringify(path)},\n`).join("");
  const text = Deno.readTextFileSync(receipt).replace('"paths": [\n', (it) => it + lines);
  Deno.writeTextFileSync(receipt, text);
  await install(scratch, checkout, ["--uninstall"]);
  assertEquals(Deno.readTextFileSync(precious), "mine");
  assert(existsSync(scratch.home));
  assertEquals(gitStatus(scratch, checkout), "");
});

testInstall("says which states it does not know and leaves them alone", async (scratch) => {
  const checkout = makeCheckout(scratch);
  await install(scratch, checkout, ["--no-schedule"]);
  const state = join(checkout, ".automaton/tasks/future/.state");
  writeFile(state, '{"schema_version": 2, "name": "future"}');
  const { stderr } = await install(scratch, checkout, ["--no-schedule"]);
  assertStringIncludes(stderr, `"${state}" is of schema 2, which this version does not know`);
  assertStringIncludes(stderr, "states of tasks and loops that need no change: 1");
  assertEquals(Deno.readTextFileSync(state), '{"schema_version": 2, "name": "future"}');
});

Deno.test("an installed checkout without packages gets them", { ignore: !HAS_SH }, async () => {
  using scratch = makeScratch();
  const checkout = copyCheckout(join(scratch.dir, "bare"), false);
  const { stdout, stderr } = await install(scratch, checkout, ["--no-loop"]);
  assertMatch(stdout, /^ok +program status /m);
  assert(!stderr.includes("to mend"), stderr);
  assertNotEquals(names(join(checkout, "vendor")), []);
  assertEquals((await program(scratch, checkout, "status", ["--version"])).code, 0);
  assert(!existsSync(join(checkout, ".automaton")), "--no-loop makes none");
});
