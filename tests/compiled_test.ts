/**
 * The compiled programs: made by install.sh, called by their absolute path from `/` with nothing in their
 * environment. Ignored where there is no base to compile with.
 */
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
  git,
  lastJson,
  loopDir,
  makeScratch,
  readJson,
  type Result,
  run,
  type Scratch,
  snapshot,
  writeFile,
  writeLoop,
  writeTask,
} from "./helpers.ts";
import {
  makeCheckout,
  makePath,
  names,
  NO_COMPILE_REASON,
  programIdentities,
  runSh,
} from "./install_support.ts";

const PROGRAMS = ["loop-runner", "status", "vram-detect"] as const;

/** One set of compiled programs, in a checkout with an awkward name; made by the first test. */
const set = {
  scratch: makeScratch(),
  checkout: "",
};
globalThis.addEventListener("unload", () => set.scratch[Symbol.dispose]());

/** Installs in a checkout with compiled programs. */
async function compile(
  scratch: Scratch,
  checkout: string,
  args: readonly string[],
): Promise<Result> {
  const env = {
    DENORT_BIN: Deno.env.get("DENORT_BIN"),
    AUTOMATON_COMPILE_DENO: Deno.env.get("AUTOMATON_COMPILE_DENO"),
  };
  const script = join(checkout, "install.sh");
  const options = { env, timeoutMs: 300_000 };
  const result = await runSh(scratch, script, ["--require-compile", ...args], options);
  assertEquals(result.code, 0, `${result.stdout}${result.stderr}`);
  return result;
}

async function compileOnce(): Promise<string> {
  if (set.checkout === "") {
    const checkout = makeCheckout(set.scratch, `it's a "check%20out" é`);
    await compile(set.scratch, checkout, ["--no-schedule"]);
    set.checkout = checkout;
  }
  return set.checkout;
}

function testCompiled(
  name: string,
  fn: (scratch: Scratch, bin: string, checkout: string) => Promise<void>,
): void {
  const reason = NO_COMPILE_REASON === null ? "" : ` (${NO_COMPILE_REASON})`;
  Deno.test({
    name: `the compiled programs ${name}${reason}`,
    ignore: NO_COMPILE_REASON !== null,
    async fn() {
      const checkout = await compileOnce();
      using scratch = makeScratch(`a project's 100%`);
      await fn(scratch, join(checkout, "bin"), checkout);
    },
  });
}

/** Runs a command from `/` with an empty environment, or only what is given. */
function runBare(
  scratch: Scratch,
  argv: readonly string[],
  env: Readonly<Record<string, string>> = {},
): Promise<Result> {
  const words = Object.entries(env).map(([name, value]) => `${name}=${value}`);
  return run(scratch, ["env", "-i", ...words, ...argv], { cwd: "/" });
}

testCompiled(
  "start anywhere, with nothing in their environment",
  async (scratch, bin, checkout) => {
    assertEquals(names(bin), [...PROGRAMS]);
    const version = /^version: (.*)$/m.exec(Deno.readTextFileSync(join(checkout, "config.md")))
      ?.[1];
    for (const name of PROGRAMS) {
      const { code, stdout, stderr } = await runBare(scratch, [join(bin, name), "--version"]);
      assertEquals([code, stdout], [0, `${name} ${version}\n`], stderr);
      const help = await runBare(scratch, [join(bin, name), "--help"]);
      assertEquals([help.code, help.stderr], [0, ""]);
      assertStringIncludes(help.stdout, `Usage: ${name} `);
      assertEquals((await runBare(scratch, [join(bin, name), "--nonsense"])).code, 2);
    }
  },
);

testCompiled(
  "find their checkout behind links and after a move",
  async (scratch, bin, checkout) => {
    const moved = join(scratch.dir, "moved é");
    Deno.symlinkSync(join(bin, "status"), join(scratch.bin, "one"));
    Deno.symlinkSync("one", join(scratch.bin, "my status"));
    const create = (program: string, loop: string) => [
      ...[program, "--create-loop", loop, "--from-template", "ci-triage"],
      ...["--project", scratch.project],
    ];
    const linked = await runBare(scratch, create(join(scratch.bin, "my status"), "linked"));
    assertEquals(linked.code, 0, linked.stderr);
    Deno.renameSync(checkout, moved);
    try {
      const result = await runBare(scratch, create(join(moved, "bin", "status"), "moved"));
      assertEquals(result.code, 0, result.stderr);
    } finally {
      Deno.renameSync(moved, checkout);
    }
    const schema = (loop: string) => readJson(join(loopDir(scratch, loop), "loop.json")).$schema;
    assertStringIncludes(`${schema("linked")}`, "loop.schema.json");
    assertStringIncludes(`${schema("moved")}`, "loop.schema.json");
  },
);

testCompiled("write nothing outside the project", async (scratch, bin) => {
  const home = snapshot(scratch.home);
  for (const name of PROGRAMS) {
    await runBare(scratch, [join(bin, name), "--version"], { HOME: scratch.home, PATH: "/bin" });
  }
  const list = await runBare(scratch, [
    join(bin, "status"),
    "--loop-list",
    "--project",
    scratch.project,
  ], {
    HOME: scratch.home,
    TMPDIR: join(scratch.dir, "tmp"),
  });
  assertEquals(list.code, 0, list.stderr);
  assertEquals(snapshot(scratch.home), home);
  assertEquals(names(join(scratch.dir, "tmp")), []);
});

testCompiled("run a tick, with each other for children", async (scratch, bin) => {
  // A sh and a git, but no deno: nothing but the compiled programs can run.
  const tools = ["cat", "env", "git", "grep", "ps", "sh", "sleep"];
  const PATH = makePath(scratch, tools);
  git(scratch, scratch.project, "init", "--quiet");
  git(scratch, scratch.project, "commit", "--quiet", "--allow-empty", "-m", "start");
  writeFile(
    join(scratch.project, ".automaton/models.json"),
    '{"default": "m", "models": {"m": {"context_tokens": 32768}}}',
  );
  writeTask(scratch, "a-task");
  const agent = `case $AUTOMATON_ROLE in
    implement) echo work >work.txt ;;
    *) echo '{"pass": true, "score": 1, "reasons": ["done"]}' ;;
  esac`;
  writeLoop(
    scratch,
    "busy",
    { harness: { command: ["sh", "-c", agent], stdin: "prompt" }, roles: {} },
    { current_task: "a-task" },
  );
  const argv = [join(bin, "loop-runner"), "--mode", "tick", "--loop", "busy", "--json"];
  const env = { PATH, HOME: scratch.home };
  const result = await runBare(scratch, [...argv, "--project", scratch.project], env);
  const summary = lastJson(result);
  const { ok, next_phase, verdict } = summary;
  assertEquals(
    [ok, next_phase, (verdict as { pass: boolean } | null)?.pass],
    [true, "design", true],
    JSON.stringify(summary),
  );
  const prompt = Deno.readTextFileSync(
    join(loopDir(scratch, "busy"), "outputs", "tick1-implement-prompt.md"),
  );
  assertStringIncludes(prompt, "a-task");
});

testCompiled("play the demo from its first tick to its last", async (scratch, bin, checkout) => {
  const PATH = makePath(
    scratch,
    ("awk basename cat chmod cp cut date dirname env expr git grep head ls mkdir mktemp mv ps rm sed sh sleep " +
      "sort tail touch tr uname wc").split(" "),
  );
  const project = join(scratch.dir, "demo project");
  const argv = ["sh", join(checkout, "install.sh"), "--demo", project];
  const env = { PATH, HOME: scratch.home, AUTOMATON_DEMO_PROGRAMS: bin };
  const { code, stdout, stderr } = await runBare(scratch, argv, env);
  assertEquals(code, 0, `${stdout}${stderr}`);
  const state = readJson(join(project, ".automaton/loops/demo/.state.loop"));
  assertEquals([state.status, state.iteration_count], ["complete", 7]);
});

testCompiled("are made again only when something changed", async (scratch, bin, checkout) => {
  const before = programIdentities(checkout);
  const { stderr } = await compile(scratch, checkout, ["--no-loop"]);
  assertStringIncludes(stderr, "the compiled programs are up to date");
  assertEquals(programIdentities(checkout), before);
  const script = join(checkout, "scripts", "vram-detect.ts");
  Deno.writeTextFileSync(script, "// A newer version.\n", { append: true });
  await compile(scratch, checkout, ["--no-loop"]);
  assertNotEquals(programIdentities(checkout)[2], before[2]);
  Deno.removeSync(join(bin, "status"));
  await compile(scratch, checkout, ["--no-loop"]);
  assertEquals(names(bin), [...PROGRAMS]);
});

// --- Permissions ---

/** What a program may do, as deno.json says. */
function readPermissions(checkout: string, name: string): Record<string, unknown> {
  const config = readJson(join(checkout, "deno.json"));
  const set = (config.permissions as Record<string, unknown>)[name];
  assert(typeof set === "object" && set !== null, `no permissions for ${name}`);
  return set as Record<string, unknown>;
}

testCompiled("hold the permissions of deno.json and no others", async (scratch, bin, checkout) => {
  for (const name of PROGRAMS) {
    // What deno compile stores: null is never, [] is always. The last one is not the base's own.
    const pattern = '"permissions":{"allow_env":[^}]*}';
    const { stdout } = await run(scratch, ["grep", "-a", "-o", pattern, join(bin, name)]);
    const stored = JSON.parse(`{${stdout.trimEnd().split("\n").at(-1)}}`).permissions;
    const wanted = readPermissions(checkout, name);
    const list = (value: unknown) => value === true ? [] : value || null;
    for (const kind of ["env", "run", "read", "write", "sys", "net", "ffi"]) {
      assertEquals(stored[`allow_${kind}`] ?? null, list(wanted[kind]), `${name}: ${kind}`);
    }
    assertEquals([stored.allow_net, stored.allow_ffi], [null, null], name);
    assertEquals([stored.deny_import, stored.prompt], [[], false], name);
  }
});

/**
 * A program in the place of each of the three: it tries what none of them may, and what not all may.
 *
 * @param port Where a server answers, so that only a permission keeps it from being reached.
 */
function probeSource(name: string, version: string, port: number, outside: string): string {
  return `const attempts: Record<string, () => unknown> = {
  fetch: () => fetch("http://127.0.0.1:${port}/"),
  connect: async () => (await Deno.connect({ hostname: "127.0.0.1", port: ${port} })).close(),
  listen: () => Deno.listen({ port: 0 }).close(),
  resolve: () => Deno.resolveDns("localhost", "A"),
  import: () => import("http://127.0.0.1:" + ${port} + "/module.js"),
  ffi: () => Deno.dlopen("libc.so.6", {}).close(),
  write: () => Deno.writeTextFileSync(${JSON.stringify(outside)} + "-${name}", "written"),
  osRelease: () => Deno.osRelease(),
  environment: () => Deno.env.get("SECRET"),
  everything: () => Deno.readTextFileSync("/proc/self/environ"),
};
if (Deno.args[0] === "--version") console.log("${name} ${version}");
else {
  const seen: Record<string, string> = {};
  for (const [what, attempt] of Object.entries(attempts)) {
    try {
      await attempt();
      seen[what] = "done";
    } catch (error) {
      seen[what] = error instanceof Error ? error.name : String(error);
    }
  }
  console.log(JSON.stringify(seen));
}
`;
}

/** What a probe sees where a program is allowed what deno.json says. */
function expectSeen(permissions: Record<string, unknown>): Record<string, unknown> {
  const denied = "NotCapable";
  return {
    fetch: denied,
    connect: denied,
    listen: denied,
    resolve: denied,
    ffi: denied,
    write: permissions.write === true ? "done" : denied,
    osRelease: denied,
    environment: permissions.env === true ? "done" : denied,
    everything: denied,
  };
}

Deno.test({
  name: `no program may reach the network, and each may do only what deno.json says${
    NO_COMPILE_REASON === null ? "" : ` (not compiled: ${NO_COMPILE_REASON})`
  }`,
  ignore: Deno.build.os !== "linux",
  async fn() {
    using scratch = makeScratch();
    const checkout = makeCheckout(scratch);
    let requests = 0;
    const server = Deno.serve({ hostname: "127.0.0.1", port: 0, onListen() {} }, () => {
      requests++;
      return new Response("export {};", { headers: { "content-type": "text/javascript" } });
    });
    const outside = join(scratch.dir, "outside");
    const version = "9.9.9";
    writeFile(join(checkout, "config.md"), `version: ${version}\n`);
    for (const name of PROGRAMS) {
      const source = probeSource(name, version, server.addr.port, outside);
      writeFile(join(checkout, "scripts", `${name}.ts`), source);
    }
    const forms = NO_COMPILE_REASON === null ? ["launchers", "compiled"] : ["launchers"];
    for (const form of forms) {
      if (form === "compiled") await compile(scratch, checkout, ["--no-loop"]);
      else await runSh(scratch, join(checkout, "install.sh"), ["--no-loop"]);
      assertEquals(readJson(join(checkout, ".install-receipt.json")).form, form);
      for (const name of PROGRAMS) {
        const { import: imported, ...seen } = lastJson(
          await run(scratch, [join(checkout, "bin", name)], { env: { SECRET: "secret" } }),
        );
        assertEquals(seen, expectSeen(readPermissions(checkout, name)), `${name}, ${form}`);
        assertMatch(`${imported}`, /^(NotCapable|TypeError)$/, `${name}, ${form}: import`);
        const isWritten = existsSync(`${outside}-${name}`);
        assertEquals(isWritten, readPermissions(checkout, name).write === true, `${name}, ${form}`);
      }
    }
    await server.shutdown();
    assertEquals(requests, 0);
  },
});
