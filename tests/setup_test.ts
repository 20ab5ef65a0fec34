/**
 * Drives lib/setup.sh as a newcomer's machine would: in a copy of the checkout, with an empty HOME and a
 * PATH that holds only what the test puts there. The npm registry, Deno's site and jsr.io are played by
 * programs and a server of the test.
 */

import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { copySync, ensureDirSync, existsSync } from "@std/fs";
import { dirname, fromFileUrl, join } from "@std/path";
import { strToU8, zipSync } from "./deps.ts";

const ROOT = fromFileUrl(new URL("..", import.meta.url));
const IGNORE = Deno.build.os === "windows";
const VERSION = "2.9.6";
/** Nothing listens on the discard port: a connection is refused at once. */
const NO_REGISTRY = "http://127.0.0.1:9/";
const STAND_INS =
  "setup: using the stand-ins from lib/std: the packages could not be had from jsr.io\n";
const PACKAGES = "setup: using the packages from jsr.io\n";

/** What setup.sh may use without asking. */
const TOOLS =
  "awk cat chmod cmp cp cut dirname find grep gzip head ldd mkdir mv rm sed sh sleep tail tar tr uname"
    .split(" ");

interface Result {
  code: number;
  stdout: string;
  stderr: string;
}

/** A copy of the checkout with a HOME and a PATH of its own, below a folder with an awkward name. */
class Machine {
  readonly place = Deno.makeTempDirSync({ prefix: "automaton setup " });
  readonly root = join(this.place, `it's a "check%20out" é`);
  readonly home = join(this.place, "home");
  readonly bin = join(this.place, "bin");
  readonly setup = join(this.root, "lib", "setup.sh");
  readonly ownDeno = join(this.root, ".deno", "bin", "deno");

  constructor() {
    for (const folder of [this.root, this.home, this.bin]) Deno.mkdirSync(folder);
    copySync(join(ROOT, "lib"), join(this.root, "lib"));
    copySync(join(ROOT, "deno.json"), join(this.root, "deno.json"));
    for (const tool of TOOLS) this.link(tool);
  }

  /** Puts a program of this machine on PATH; false if it is not installed. */
  link(tool: string): boolean {
    const folder = ["/usr/bin", "/bin", "/usr/local/bin"].find((f) => existsSync(join(f, tool)));
    if (folder === undefined) return false;
    Deno.symlinkSync(join(folder, tool), join(this.bin, tool));
    return true;
  }

  /** Writes a sh program. */
  program(path: string, ...lines: string[]): string {
    ensureDirSync(dirname(path));
    Deno.writeTextFileSync(path, ["#!/bin/sh", ...lines, ""].join("\n"), { mode: 0o755 });
    return path;
  }

  /** Puts a sh program on PATH that appends its arguments to `<name>.log` first. */
  command(name: string, ...lines: string[]): void {
    const path = join(this.bin, name);
    if (existsSync(path)) Deno.removeSync(path);
    this.program(path, `printf '%s\\n' "$*" >>'${join(this.place, name)}.log'`, ...lines);
  }

  /** Tells how often a command() ran. */
  calls(name: string): number {
    const log = join(this.place, `${name}.log`);
    return existsSync(log) ? Deno.readTextFileSync(log).trimEnd().split("\n").length : 0;
  }

  /** Writes a Deno that says it has a version and does what the real one does. */
  deno(path: string, version = VERSION): string {
    return this.program(path, ...denoLines(version));
  }

  start(
    options: { args?: string[]; env?: Record<string, string>; cwd?: string } = {},
  ): Deno.ChildProcess {
    return new Deno.Command("/bin/sh", {
      args: [this.setup, ...options.args ?? []],
      clearEnv: true,
      env: { PATH: this.bin, HOME: this.home, JSR_URL: NO_REGISTRY, ...options.env },
      cwd: options.cwd ?? this.place,
      stdout: "piped",
      stderr: "piped",
      detached: true,
    }).spawn();
  }

  async run(options: Parameters<Machine["start"]>[0] = {}): Promise<Result> {
    return await resultOf(this.start(options));
  }

  /** Runs setup.sh with the Deno that runs the tests. */
  runWithDeno(options: { args?: string[]; env?: Record<string, string> } = {}): Promise<Result> {
    return this.run({ ...options, env: { AUTOMATON_DENO: Deno.execPath(), ...options.env } });
  }

  vendored(name: string): string {
    return Deno.readTextFileSync(join(this.root, "vendor", name));
  }

  remove(): void {
    Deno.removeSync(this.place, { recursive: true });
  }

  /** Requires that nothing was installed and nothing is left of the attempt. */
  assertNothingInstalled(): void {
    assertEquals(list(join(this.root, ".deno")), []);
    assertEquals(list(this.home), []);
  }
}

function denoLines(version: string): string[] {
  return [
    `case $1 in`,
    `--version) echo 'deno ${version} (stable, release, test)' ;;`,
    `eval) exit 1 ;;`,
    `*) exec '${Deno.execPath()}' "$@" ;;`,
    `esac`,
  ];
}

async function resultOf(process: Deno.ChildProcess): Promise<Result> {
  const { code, stdout, stderr } = await process.output();
  const decoder = new TextDecoder();
  return { code, stdout: decoder.decode(stdout), stderr: decoder.decode(stderr) };
}

function list(folder: string): string[] {
  return existsSync(folder) ? [...Deno.readDirSync(folder)].map(({ name }) => name).sort() : [];
}

function testSetup(name: string, fn: (machine: Machine) => Promise<void>): void {
  Deno.test({
    name: `setup.sh ${name}`,
    ignore: IGNORE,
    async fn() {
      const machine = new Machine();
      try {
        await fn(machine);
      } finally {
        machine.remove();
      }
    },
  });
}

/** Requires a refusal: one line that holds a text, nothing on stdout, nothing left behind. */
function assertRefused(machine: Machine, result: Result, text: string): void {
  assertEquals(result.stdout, "");
  assertEquals(result.code, 1);
  assertStringIncludes(result.stderr.trimEnd().split("\n").at(-1) ?? "", text);
  machine.assertNothingInstalled();
}

async function hexDigest(algorithm: string, bytes: Uint8Array<ArrayBuffer>): Promise<string> {
  return new Uint8Array(await crypto.subtle.digest(algorithm, bytes)).toHex();
}

// --- Finding Deno ---

testSetup("prints the Deno it is told to use, and nothing else", async (machine) => {
  const result = await machine.runWithDeno();
  assertEquals(result, { code: 0, stdout: `${Deno.execPath()}\n`, stderr: STAND_INS });
  // Deno keeps a cache there.
  assertEquals(list(machine.home), [".cache"]);
});

testSetup("looks on PATH, in ~/.deno/bin and in the checkout, in this order", async (machine) => {
  const places = [machine.ownDeno, join(machine.home, ".deno/bin/deno"), join(machine.bin, "deno")];
  for (const place of places) {
    machine.deno(place);
    assertEquals(await machine.run(), { code: 0, stdout: `${place}\n`, stderr: STAND_INS });
  }
});

testSetup("finds a Deno that PATH names relative to the working directory", async (machine) => {
  machine.deno(join(machine.place, "sub", "deno"));
  const result = await machine.run({ env: { PATH: `sub:${machine.bin}` } });
  assertEquals(result.stdout, `${machine.place}/sub/deno\n`);
});

testSetup("passes over a Deno that is too old, or does not run", async (machine) => {
  const old = machine.deno(join(machine.bin, "deno"), "2.5.9");
  const broken = machine.program(join(machine.home, ".deno/bin/deno"), "exit 127");
  machine.deno(machine.ownDeno, "2.6.0");
  assertEquals(await machine.run(), {
    code: 0,
    stdout: `${machine.ownDeno}\n`,
    stderr: `setup: passing over ${old}: version 2.5.9 is older than 2.6.0\n` +
      `setup: passing over ${broken}: it does not run here\n${STAND_INS}`,
  });
});

for (const version of ["2.6.0", "2.6.8", "2.10.0", "3.0.0", "10.1.2"]) {
  testSetup(`takes Deno ${version}`, async (machine) => {
    machine.deno(join(machine.bin, "deno"), version);
    assertEquals((await machine.run()).code, 0);
  });
}

for (const version of ["1.46.3", "2.5.10", "2.0.0"]) {
  testSetup(`refuses to be told to use Deno ${version}`, async (machine) => {
    const deno = machine.deno(join(machine.place, "deno"), version);
    const result = await machine.run({ env: { AUTOMATON_DENO: deno } });
    assertRefused(machine, result, `Cannot use AUTOMATON_DENO "${deno}": Deno 2.6.0 or newer`);
  });
}

testSetup("refuses to be told to use what is not there", async (machine) => {
  machine.deno(join(machine.bin, "deno"));
  const result = await machine.run({ env: { AUTOMATON_DENO: "/no/deno" } });
  assertRefused(machine, result, 'Cannot use AUTOMATON_DENO "/no/deno": no such program');
});

testSetup("prints the program that a wrapper starts", async (machine) => {
  const wrapper = machine.program(join(machine.bin, "deno"), `exec '${Deno.execPath()}' "$@"`);
  assertEquals((await machine.run()).stdout, `${Deno.execPath()}\n`);
  Deno.removeSync(wrapper);
});

testSetup("does without HOME", async (machine) => {
  const process = new Deno.Command("/bin/sh", {
    args: [machine.setup],
    clearEnv: true,
    env: { PATH: machine.bin, AUTOMATON_DENO: Deno.execPath(), JSR_URL: NO_REGISTRY },
    stdout: "piped",
    stderr: "piped",
  }).spawn();
  assertEquals((await resultOf(process)).stdout, `${Deno.execPath()}\n`);
});

testSetup("does not know other arguments", async (machine) => {
  assertEquals(await machine.run({ args: ["--refesh"] }), {
    code: 2,
    stdout: "",
    stderr: 'setup: Unknown argument "--refesh"; known: --refresh, --help\n',
  });
});

testSetup("explains itself", async (machine) => {
  const { code, stdout } = await machine.run({ args: ["--help"] });
  assertEquals(code, 0);
  assertStringIncludes(stdout, "Usage: sh lib/setup.sh [--refresh]");
  assert(!stdout.includes("set -eu"), stdout);
});

// --- Installing Deno with npm ---

/** Puts an npm on PATH that packs a Deno, and makes setup.sh expect that package. */
async function offerByNpm(machine: Machine, version = VERSION): Promise<void> {
  const folder = join(machine.place, "registry");
  machine.deno(join(folder, "package", "deno"), version);
  const archive = join(folder, "deno.tgz");
  const { success } = await new Deno.Command("tar", {
    args: ["-czf", archive, "-C", folder, "package"],
  }).output();
  assert(success);
  const digest = await crypto.subtle.digest("SHA-512", Deno.readFileSync(archive));
  const integrity = new Uint8Array(digest).toBase64();
  const text = Deno.readTextFileSync(machine.setup);
  let count = 0;
  Deno.writeTextFileSync(
    machine.setup,
    text.replace(/integrity=[A-Za-z0-9+/]{86}==/g, () => {
      count++;
      return `integrity=${integrity}`;
    }),
  );
  assertEquals(count, 6, "platforms whose integrity setup.sh names");
  machine.command(
    "npm",
    'mkdir -p "${npm_config_cache:-$HOME/.npm}"',
    `cp '${archive}' deno-package-${VERSION}.tgz`,
    "echo deno.tgz",
  );
  assert(machine.link("node"), "npm needs node");
}

testSetup("installs the pinned Deno with npm, once", async (machine) => {
  await offerByNpm(machine);
  const first = await machine.run();
  assertEquals(first, {
    code: 0,
    stdout: `${machine.ownDeno}\n`,
    stderr: `setup: installing Deno ${VERSION} with npm (about 42 MB)\n${STAND_INS}`,
  });
  assertEquals(await machine.run(), { ...first, stderr: STAND_INS });
  assertEquals(machine.calls("npm"), 1);
  assertEquals(list(join(machine.root, ".deno")), ["bin"]);
  assertEquals(list(machine.home), [".cache"]);
  const log = Deno.readTextFileSync(join(machine.place, "npm.log"));
  assertMatch(log, /^pack --loglevel=error @deno\/[a-z0-9-]+@2\.9\.6\n$/);
});

testSetup("replaces a Deno of its own that is too old", async (machine) => {
  await offerByNpm(machine);
  machine.deno(machine.ownDeno, "2.5.0");
  assertEquals((await machine.run()).stdout, `${machine.ownDeno}\n`);
  assertStringIncludes(Deno.readTextFileSync(machine.ownDeno), VERSION);
});

testSetup("refuses a package that is not the pinned one", async (machine) => {
  await offerByNpm(machine);
  Deno.writeTextFileSync(join(machine.place, "registry", "deno.tgz"), "x", { append: true });
  // Deno's site would do, but something is wrong here that a person should look at.
  machine.command("curl", "exit 1");
  const result = await machine.run();
  assertRefused(machine, result, `Cannot install Deno ${VERSION}: the download has sha512 `);
  assertEquals(machine.calls("curl"), 0);
});

testSetup("refuses a package whose Deno does not run here", async (machine) => {
  await offerByNpm(machine, "2.9.5");
  assertRefused(machine, await machine.run(), "the downloaded program does not run here");
});

testSetup("says that npm failed when there is no curl", async (machine) => {
  machine.command("npm", "echo 'npm error network' >&2", "exit 1");
  const result = await machine.run();
  assertRefused(machine, result, `Cannot download Deno ${VERSION}: npm failed, and curl is not`);
  assertStringIncludes(result.stderr, "npm error network\n");
});

testSetup("says that npm failed when it writes no package", async (machine) => {
  machine.command("npm", "echo deno.tgz");
  const result = await machine.run();
  assertRefused(machine, result, `Cannot download Deno ${VERSION}: npm failed`);
});

testSetup("says what it needs when neither npm nor curl is there", async (machine) => {
  const result = await machine.run();
  assertRefused(
    machine,
    result,
    `Cannot install Deno ${VERSION}: neither npm nor curl is installed`,
  );
  assertEquals(result.stderr.split("\n").length, 2);
});

testSetup("says that Deno does not run on musl", async (machine) => {
  await offerByNpm(machine);
  machine.command("uname", '[ "$1" = -m ] && echo x86_64 || echo Linux');
  machine.command("ldd", "echo 'musl libc (x86_64)' >&2", "exit 1");
  assertRefused(machine, await machine.run(), "Cannot install Deno: it needs glibc");
  assertEquals(machine.calls("npm"), 0);
});

for (const [system, processor] of [["FreeBSD", "amd64"], ["Linux", "riscv64"], ["Darwin", "ppc"]]) {
  testSetup(`says that there is no Deno for ${system} on ${processor}`, async (machine) => {
    await offerByNpm(machine);
    machine.command("uname", `[ "$1" = -m ] && echo ${processor} || echo ${system}`);
    const result = await machine.run();
    assertRefused(machine, result, `there is none for ${system} on ${processor}`);
    assertEquals(machine.calls("npm"), 0);
  });
}

for (
  const [system, processor, platform] of [
    ["Linux", "x86_64", "linux-x64-glibc"],
    ["Linux", "aarch64", "linux-arm64-glibc"],
    ["Darwin", "x86_64", "darwin-x64"],
    ["Darwin", "arm64", "darwin-arm64"],
    ["MINGW64_NT-10.0-22631", "x86_64", "win32-x64"],
    ["MINGW64_NT-10.0-22631", "aarch64", "win32-arm64"],
  ] as const
) {
  testSetup(`asks npm for ${platform} on ${system} ${processor}`, async (machine) => {
    machine.command("npm", "exit 1");
    machine.command("ldd", "echo 'ldd (GNU libc) 2.36'");
    machine.command("uname", `[ "$1" = -m ] && echo ${processor} || echo ${system}`);
    await machine.run();
    const log = Deno.readTextFileSync(join(machine.place, "npm.log"));
    assertStringIncludes(log, `@deno/${platform}@${VERSION}\n`);
  });
}

// --- Installing Deno with curl ---

/** Puts a curl on PATH that serves a zipped Deno as Deno's site does. */
async function offerByCurl(machine: Machine, ...lines: string[]): Promise<string> {
  const site = join(machine.place, "site");
  ensureDirSync(site);
  const deno = strToU8(["#!/bin/sh", ...denoLines(VERSION), ""].join("\n"));
  const zip = new Uint8Array(zipSync({ deno: [deno, { os: 3, attrs: 0o755 << 16 }] }));
  Deno.writeFileSync(join(site, "zip"), zip);
  Deno.writeTextFileSync(join(site, "sum"), `${await hexDigest("SHA-256", zip)}  deno.zip\n`);
  machine.command(
    "curl",
    ...lines,
    'while [ "$#" -gt 1 ]; do [ "$1" != -o ] || out=$2; shift; done',
    `case $1 in`,
    `https://dl.deno.land/release/v${VERSION}/deno-*.zip) cp '${site}/zip' "$out" ;;`,
    `https://dl.deno.land/release/v${VERSION}/deno-*.zip.sha256sum) cp '${site}/sum' "$out" ;;`,
    `*) exit 22 ;;`,
    `esac`,
  );
  for (const tool of ["sha256sum", "shasum", "openssl"]) machine.link(tool);
  return site;
}

for (const tool of ["unzip", "bsdtar", "python3", "busybox"]) {
  Deno.test({
    name: `setup.sh installs the pinned Deno with curl and ${tool}`,
    ignore: IGNORE || !existsSync(`/usr/bin/${tool}`),
    async fn() {
      const machine = new Machine();
      try {
        await offerByCurl(machine);
        machine.link(tool);
        const result = await machine.run();
        assertEquals([result.code, result.stdout], [0, `${machine.ownDeno}\n`], result.stderr);
        assertMatch(result.stderr, /^setup: installing Deno 2\.9\.6 from https:.*\.zip \(about/);
        assertEquals(list(join(machine.root, ".deno")), ["bin"]);
        assertEquals(machine.calls("curl"), 2);
      } finally {
        machine.remove();
      }
    },
  });
}

testSetup("says what it needs to unpack what curl got", async (machine) => {
  await offerByCurl(machine);
  const result = await machine.run();
  assertRefused(machine, result, "none of unzip, bsdtar, python3 and busybox is installed");
});

testSetup("turns to curl when npm can't download", async (machine) => {
  await offerByCurl(machine);
  for (const tool of ["unzip", "bsdtar", "python3", "busybox"]) machine.link(tool);
  machine.command("npm", "exit 1");
  const result = await machine.run();
  assertEquals(result.stdout, `${machine.ownDeno}\n`, result.stderr);
});

testSetup("refuses a download that is cut and that curl notices", async (machine) => {
  await offerByCurl(machine, 'printf half >"$7"', "exit 18");
  assertRefused(
    machine,
    await machine.run(),
    `Cannot download Deno ${VERSION}: curl failed on https:`,
  );
});

testSetup("refuses a download that is cut and that curl does not notice", async (machine) => {
  const site = await offerByCurl(machine);
  Deno.truncateSync(join(site, "zip"), 100);
  assertRefused(
    machine,
    await machine.run(),
    `Cannot install Deno ${VERSION}: the download has sha256 `,
  );
});

testSetup("refuses a download whose checksum the site does not name", async (machine) => {
  const site = await offerByCurl(machine);
  Deno.writeTextFileSync(join(site, "sum"), "<html>not found</html>\n");
  assertRefused(machine, await machine.run(), "not one that the site names");
});

testSetup("reads the checksum in the form that the site has for Windows", async (machine) => {
  const site = await offerByCurl(machine);
  for (const tool of ["unzip", "bsdtar", "python3", "busybox"]) machine.link(tool);
  const [sum = ""] = Deno.readTextFileSync(join(site, "sum")).split(" ");
  const table =
    `\r\nAlgorithm : SHA256\r\nHash      : ${sum.toUpperCase()}\r\nPath      : C:\\deno.zip\r\n`;
  Deno.writeTextFileSync(join(site, "sum"), table);
  const result = await machine.run();
  assertEquals(result.stdout, `${machine.ownDeno}\n`, result.stderr);
});

// --- Interruptions and company ---

/** Starts setup.sh with an npm that waits, and returns once npm runs. */
async function startAndWaitForNpm(machine: Machine): Promise<Deno.ChildProcess> {
  const pipe = join(machine.place, "started");
  const { success } = await new Deno.Command("mkfifo", { args: [pipe] }).output();
  assert(success);
  machine.command("npm", "printf half >half.tgz", `echo started >'${pipe}'`, "exec sleep 600");
  const process = machine.start();
  await Deno.readTextFile(pipe);
  return process;
}

for (const [signal, code] of [["SIGINT", 130], ["SIGTERM", 143], ["SIGHUP", 129]] as const) {
  testSetup(`leaves nothing behind after ${signal}`, async (machine) => {
    const process = await startAndWaitForNpm(machine);
    Deno.kill(-process.pid, signal);
    const result = await resultOf(process);
    assertEquals([result.code, result.stdout], [code, ""], result.stderr);
    machine.assertNothingInstalled();
  });
}

testSetup("goes on where one that was killed left off", async (machine) => {
  const process = await startAndWaitForNpm(machine);
  Deno.kill(-process.pid, "SIGKILL");
  await resultOf(process);
  assertEquals(list(join(machine.root, ".deno")), ["setup.lock", "work"]);
  await offerByNpm(machine);
  const result = await machine.run();
  assertEquals([result.code, result.stdout], [0, `${machine.ownDeno}\n`], result.stderr);
  assertStringIncludes(
    result.stderr,
    `setup: taking over from setup ${process.pid}, which is gone\n`,
  );
  assertEquals(list(join(machine.root, ".deno")), ["bin"]);
});

testSetup("installs once when several run at the same time", async (machine) => {
  await offerByNpm(machine);
  const results = await Promise.all([1, 2, 3, 4].map(() => machine.run()));
  for (const { code, stdout, stderr } of results) {
    assertEquals([code, stdout], [0, `${machine.ownDeno}\n`], stderr);
  }
  assertEquals(machine.calls("npm"), 1);
  assertEquals(list(join(machine.root, ".deno")), ["bin"]);
  assertEquals(list(join(machine.root, "vendor")), [".source", "jsr.io"]);
});

// --- Packages ---

/** Plays jsr.io: each package is its stand-in with one more line. Returns the number of requests so far. */
async function withRegistry(
  use: (url: string, requests: () => number) => Promise<void>,
  answer: (path: string) => Promise<Response> | Response = registryAnswer,
): Promise<void> {
  let count = 0;
  const server = Deno.serve({ hostname: "127.0.0.1", port: 0, onListen() {} }, (request) => {
    count++;
    return answer(new URL(request.url).pathname);
  });
  try {
    await use(`http://127.0.0.1:${server.addr.port}/`, () => count);
  } finally {
    await server.shutdown();
  }
}

const NOT_FOUND = () => new Response("not found", { status: 404 });

async function registryAnswer(path: string): Promise<Response> {
  const [, name = "", file] = /^\/@std\/([a-z]+)\/(.+)$/.exec(path) ?? [];
  const version = packageVersions().get(name);
  if (version === undefined) return NOT_FOUND();
  const module = Deno.readTextFileSync(join(ROOT, "lib", "std", name, "mod.ts")) + "// from jsr\n";
  const checksum = await hexDigest("SHA-256", new TextEncoder().encode(module));
  const manifest = { "/mod.ts": { size: module.length, checksum: `sha256-${checksum}` } };
  switch (file) {
    case "meta.json":
      return Response.json({ scope: "std", name, latest: version, versions: { [version]: {} } });
    case `${version}_meta.json`:
      return Response.json({ manifest, exports: { ".": "./mod.ts" } });
    case `${version}/mod.ts`:
      return new Response(module, { headers: { "content-type": "text/typescript" } });
    default:
      return NOT_FOUND();
  }
}

/** Reads the packages of deno.json. */
function packageVersions(): Map<string, string> {
  const { imports } = JSON.parse(Deno.readTextFileSync(join(ROOT, "deno.json")));
  return new Map(
    Object.values<string>(imports).map((specifier) => {
      const [, name = "", version = ""] = /^jsr:@std\/([a-z]+)@([\d.]+)$/.exec(specifier) ?? [];
      assert(version, `not an exact version: ${specifier}`);
      return [name, version];
    }),
  );
}

/** Runs a program of the checkout that uses a package, without any flag and any cache. */
async function runProgram(machine: Machine, env: Record<string, string> = {}): Promise<string> {
  const program = join(machine.root, "program.ts");
  Deno.writeTextFileSync(
    program,
    'import { join } from "@std/path";\nconsole.log(join("a", "b"));\n',
  );
  const { stdout, stderr } = await new Deno.Command(Deno.execPath(), {
    args: ["run", "--check", program],
    clearEnv: true,
    env: { HOME: join(machine.place, "fresh home"), JSR_URL: NO_REGISTRY, NO_COLOR: "1", ...env },
  }).output();
  const decoder = new TextDecoder();
  return decoder.decode(stdout) || decoder.decode(stderr);
}

Deno.test("the stand-ins say which version of which package they stand in for", () => {
  for (const [name, version] of packageVersions()) {
    const text = Deno.readTextFileSync(join(ROOT, "lib", "std", name, "mod.ts"));
    assertStringIncludes(text, `Stand-in for \`@std/${name}\` ${version}`);
  }
});

testSetup("lets programs run and be checked where no registry answers", async (machine) => {
  await machine.runWithDeno();
  assertEquals(await runProgram(machine, { JSR_URL: "https://jsr.io/" }), "a/b\n");
});

testSetup("writes stand-ins once, and again when they change", async (machine) => {
  await machine.runWithDeno();
  const vendor = () => Deno.statSync(join(machine.root, "vendor")).ino;
  const before = vendor();
  await machine.runWithDeno();
  assertEquals(vendor(), before);
  Deno.writeTextFileSync(join(machine.root, "lib/std/cli/mod.ts"), "// new\n", { append: true });
  await machine.runWithDeno();
  assertMatch(machine.vendored("jsr.io/@std/cli/1.0.32/mod.ts"), /\/\/ new\n$/);
  Deno.removeSync(join(machine.root, "vendor/jsr.io/@std/path"), { recursive: true });
  await machine.runWithDeno();
  assertEquals(await runProgram(machine, { JSR_URL: "https://jsr.io/" }), "a/b\n");
});

testSetup(
  "puts packages in the place of stand-ins as soon as the registry answers",
  async (machine) => {
    assertEquals((await machine.runWithDeno()).stderr, STAND_INS);
    await withRegistry(async (url, requests) => {
      const env = { JSR_URL: url };
      const result = await machine.runWithDeno({ env });
      assertEquals(result, { code: 0, stdout: `${Deno.execPath()}\n`, stderr: PACKAGES });
      assert(!existsSync(join(machine.root, "vendor/jsr.io")), "the stand-ins are still there");
      const asked = requests();
      assertEquals((await machine.runWithDeno({ env })).stderr, PACKAGES);
      assertEquals(requests(), asked, "requests of a run that finds everything in place");
      await machine.runWithDeno({ env, args: ["--refresh"] });
      assert(requests() > asked, "--refresh asked nobody");
    });
  },
);

testSetup("keeps packages once they are there", async (machine) => {
  let url = "";
  await withRegistry(async (address) => {
    url = address;
    await machine.runWithDeno({ env: { JSR_URL: url } });
  });
  for (const args of [[], ["--refresh"]]) {
    assertEquals((await machine.runWithDeno({ args, env: { JSR_URL: url } })).stderr, PACKAGES);
    assertEquals(await runProgram(machine, { JSR_URL: url }), "a/b\n");
  }
});

testSetup("keeps stand-ins when something else answers", async (machine) => {
  const page = () => new Response("<html>Please log in</html>");
  await withRegistry(async (url) => {
    assertEquals((await machine.runWithDeno({ env: { JSR_URL: url } })).stderr, STAND_INS);
  }, page);
});

testSetup("keeps stand-ins when a package can't be had", async (machine) => {
  const lacksOne = (path: string) =>
    path.startsWith("/@std/cli/1") ? NOT_FOUND() : registryAnswer(path);
  await withRegistry(async (url) => {
    const result = await machine.runWithDeno({ env: { JSR_URL: url } });
    assertEquals([result.code, result.stdout], [0, `${Deno.execPath()}\n`]);
    assert(result.stderr.endsWith(STAND_INS), result.stderr);
  }, lacksOne);
  assertEquals(list(join(machine.root, ".deno")), []);
  assertEquals(await runProgram(machine, { JSR_URL: "https://jsr.io/" }), "a/b\n");
});

testSetup("does not wait for a registry that never answers", async (machine) => {
  let answer = (_: Response) => {};
  const silence = new Promise<Response>((resolve) => answer = resolve);
  await withRegistry(async (url) => {
    assertEquals((await machine.runWithDeno({ env: { JSR_URL: url } })).stderr, STAND_INS);
    answer(NOT_FOUND());
  }, () => silence);
});

// --- For real ---

Deno.test({
  name: "setup.sh installs the pinned Deno from the npm registry, if AUTOMATON_TEST_NETWORK is set",
  ignore: IGNORE || !Deno.env.has("AUTOMATON_TEST_NETWORK"),
  async fn() {
    const machine = new Machine();
    try {
      for (const tool of ["npm", "node", "env"]) assert(machine.link(tool), `${tool} is needed`);
      const { AUTOMATON_DENO: _, ...env } = Deno.env.toObject();
      const result = await machine.run({
        env: { ...env, PATH: machine.bin, HOME: machine.home, JSR_URL: NO_REGISTRY },
      });
      assertEquals([result.code, result.stdout], [0, `${machine.ownDeno}\n`], result.stderr);
      const { stdout } = await new Deno.Command(machine.ownDeno, { args: ["--version"] }).output();
      assertStringIncludes(new TextDecoder().decode(stdout), `deno ${VERSION} `);
    } finally {
      machine.remove();
    }
  },
});
