#!/usr/bin/env -S deno run -q --no-prompt -P=vram-detect
/**
 * vram-detect: how many tokens of context a model can hold on this machine.
 *
 * Prints one number with its derivation, or null with a reason. The number comes from the first of
 * AUTOMATON_CONTEXT_TOKENS, the window that models.json declares, and a model file (GGUF, a folder
 * with config.json and safetensors, an ollama manifest) measured against the memory that is free.
 * There is no default: where nothing is known, nothing is claimed.
 *
 * A figure holds for llama.cpp and what is built on it (ollama), with flash attention and all layers
 * on the devices that count. Slots share the cells that keep the whole context, as llama-server's
 * unified cache does; each has its own window and recurrent state. Memory that a model takes which
 * is loaded already is not free: the window of a running server is better declared than measured.
 *
 * Reads: `<project>/.automaton/models.json`, else `<framework>/models.json` (outside a project the
 * framework counts as one); its `gguf` and `mmproj` are paths from that file's folder, or begin with
 * `~`; the model's files; on Linux /proc and /sys, through `sh`, because Deno itself may not.
 * Runs: nvidia-smi, rocm-smi, sysctl, reg, powershell, sh, each with a deadline. Writes nothing.
 * Environment: AUTOMATON_CONTEXT_TOKENS, AUTOMATON_HOME, AUTOMATON_PROJECT, CUDA_VISIBLE_DEVICES,
 * HIP_VISIBLE_DEVICES, HOME, OLLAMA_MODELS, PATH, ROCR_VISIBLE_DEVICES, USERPROFILE.
 * Permissions: read, env, run; no network, no writing.
 * Exit codes: 0 a figure was found, 1 none could be, 2 usage error.
 *
 * @module
 */

import { parseArgs } from "@std/cli";
import { parse as parseJsonc } from "@std/jsonc";
import { basename, dirname, fromFileUrl, join, resolve } from "@std/path";

// --- Constants ---

const KIB = 1024;
const MIB = 1024 * KIB;
const GIB = 1024 * MIB;

/** Smallest window, in tokens, in which a loop may run (the project's own rule). */
export const FLOOR_TOKENS = 16000;

/** A printed window is a multiple of this: llama.cpp pads a context to 256 cells (2026-09). */
const CONTEXT_STEP_TOKENS = 256;

/** llama.cpp's default physical batch, `--ubatch-size` (2026-09). */
const DEFAULT_UBATCH_TOKENS = 512;

/** No window, count or size in a model's header is larger: llama.cpp keeps them in 32 bits. */
const LARGEST_COUNT = 2 ** 31;

/**
 * Kept back on each device for the driver, the screen and fragmentation: the larger of the two. A
 * share alone is too thin on 24 GB cards (llama.cpp's `--fit-target` is 1024 MiB, 2026-09).
 */
const HEADROOM_BYTES = 1024 * MIB;
const HEADROOM_SHARE = 0.03;

/**
 * Where a file names no vocabulary: the largest in common use (Gemma 3n, 262,400 rows with
 * padding, 2026-09), so that the compute buffer is never underestimated.
 */
const LARGEST_VOCAB_TOKENS = 262400;

/** How ggml stores numbers: `bytes` hold a block of `elements`. */
type BlockFormat = readonly [id: number, name: string, elements: number, bytes: number];

/**
 * ggml's formats, each with its number in GGUF files (ggml.h and ggml-common.h of llama.cpp,
 * 2026-09). Numbers that are not here were removed or are not known.
 */
// deno-fmt-ignore -- a table: a family a line.
const BLOCK_FORMATS: readonly BlockFormat[] = [
  [0, "f32", 1, 4], [1, "f16", 1, 2], [30, "bf16", 1, 2], [28, "f64", 1, 8],
  [24, "i8", 1, 1], [25, "i16", 1, 2], [26, "i32", 1, 4], [27, "i64", 1, 8],
  [2, "q4_0", 32, 18], [3, "q4_1", 32, 20], [6, "q5_0", 32, 22], [7, "q5_1", 32, 24],
  [8, "q8_0", 32, 34], [9, "q8_1", 32, 36], [41, "q1_0", 128, 18], [42, "q2_0", 64, 18],
  [10, "q2_k", 256, 84], [11, "q3_k", 256, 110], [12, "q4_k", 256, 144], [13, "q5_k", 256, 176],
  [14, "q6_k", 256, 210], [15, "q8_k", 256, 292],
  [16, "iq2_xxs", 256, 66], [17, "iq2_xs", 256, 74], [22, "iq2_s", 256, 82],
  [18, "iq3_xxs", 256, 98], [21, "iq3_s", 256, 110], [19, "iq1_s", 256, 50], [29, "iq1_m", 256, 56],
  [20, "iq4_nl", 32, 18], [23, "iq4_xs", 256, 136],
  [34, "tq1_0", 256, 54], [35, "tq2_0", 256, 66], [39, "mxfp4", 32, 17], [40, "nvfp4", 64, 36],
];
const TENSOR_FORMATS = new Map(BLOCK_FORMATS.map((format) => [format[0], format]));

/** What llama.cpp accepts for `--cache-type-k` and `-v` (2026-09). */
const KV_TYPES = ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"];

/** Limits of a GGUF header. Real headers hold some fifty keys and a few thousand tensors. */
const GGUF_LIMITS = {
  readBytes: 64 * MIB,
  windowBytes: 64 * KIB,
  keys: 4096,
  /** The format allows 65,535; the longest in use is below 100. */
  keyBytes: 1024,
  /** Longer texts (chat templates, licences) are stepped over. */
  textBytes: 256,
  /** As in ggml's own reader. */
  length: 2 ** 30,
  tensors: 131072,
  /** ggml's GGML_MAX_NAME, with the final zero. */
  tensorNameBytes: 64,
  dimensions: 4,
  layers: 1024,
};

/** Value types of GGUF metadata with a fixed size, by number: bytes, reading (gguf.md, version 3). */
// deno-fmt-ignore -- a table: one row a line.
const GGUF_SCALARS: Readonly<Record<number, readonly [number, (view: DataView, at: number) => number]>> = {
  0: [1, (view, at) => view.getUint8(at)],
  1: [1, (view, at) => view.getInt8(at)],
  2: [2, (view, at) => view.getUint16(at, true)],
  3: [2, (view, at) => view.getInt16(at, true)],
  4: [4, (view, at) => view.getUint32(at, true)],
  5: [4, (view, at) => view.getInt32(at, true)],
  6: [4, (view, at) => view.getFloat32(at, true)],
  7: [1, (view, at) => view.getUint8(at)],
  10: [8, (view, at) => Number(view.getBigUint64(at, true))],
  11: [8, (view, at) => Number(view.getBigInt64(at, true))],
  12: [8, (view, at) => view.getFloat64(at, true)],
};
const GGUF_BOOL = 7;
const GGUF_STRING = 8;
const GGUF_ARRAY = 9;

/** How an architecture uses a sliding window. */
interface WindowRule {
  /** Window in tokens where the file has no `attention.sliding_window`. */
  defaultTokens?: number;
  /** Window in tokens whatever the file says, unless it says 0. */
  fixedTokens?: number;
  /** Every Nth layer attends to everything, where the file has no pattern. */
  period?: number;
  /** The full layer is the first of each N, not the last. */
  isFullFirst?: boolean;
  /** Only models with this many layers have a window. */
  onlyLayers?: number;
}

/** What sets an architecture apart from plain attention on every layer. */
interface ArchitectureRule {
  window?: WindowRule;
  /**
   * Which layers keep a recurrent state: all and none attends; all and each attends "beside" it; all
   * but every Nth ("interval", N being `full_attention_interval`); those without KV heads; of these
   * only those without a feed-forward part.
   */
  recurrent?: "all" | "beside" | "interval" | "headless" | "headless-without-ff";
  /** Which numbers give the size of the recurrent state. */
  state?: "ssm" | "shortconv" | "wkv";
  /** For wkv: how many earlier embeddings are kept. */
  tokenShifts?: number;
  /** Layers that hold KV where the file has no `attention.shared_kv_layers`. */
  defaultKvLayers?: number;
  /** Keeps more than K and V in a way that is not known here. */
  isRefused?: boolean;
  /** Not in the tables: nothing that would make the figure smaller is believed. */
  isUnknown?: boolean;
}

/** Architectures with K and V on every layer. phi3 and llama ignore `attention.sliding_window`. */
const PLAIN_ARCHITECTURES: readonly string[] =
  ("apertus arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom chatglm codeshell command-r " +
    "dbrx deci deepseek deepseek2 dots1 dream ernie4_5 ernie4_5-moe exaone falcon gemma glm4 " +
    "glm4moe gpt2 gptj gptneox granite granitemoe grok grovemoe hunyuan-dense hunyuan-moe " +
    "internlm2 jais llada llada-moe llama minicpm minicpm3 minimax-m2 mistral3 mpt nemotron olmo " +
    "olmoe openelm orion phi2 phi3 phimoe plamo plm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe " +
    "qwen3vl qwen3vlmoe refact seed_oss smollm3 stablelm starcoder starcoder2 xverse").split(" ");

/**
 * The others (the load_hparams of each architecture in llama.cpp's sources, 2026-09). Where a layer
 * pattern is an array in the file, that array counts.
 */
const SPECIAL_ARCHITECTURES: Readonly<Record<string, ArchitectureRule>> = {
  "afmoe": { window: { period: 4 } },
  "cohere2": { window: { period: 4 } },
  "cohere2moe": { window: {} },
  "exaone-moe": { window: { period: 4 } },
  "exaone4": { window: { period: 4, onlyLayers: 64 } },
  "gemma2": { window: { period: 2, defaultTokens: 4096 } },
  "gemma3": { window: { period: 6 } },
  "gemma3n": { window: { period: 5 }, defaultKvLayers: 20 },
  "gemma4": { window: {} },
  "gpt-oss": { window: { period: 2 } },
  "llama4": { window: { period: 4, fixedTokens: 8192 } },
  "mimo2": { window: {} },
  "olmo2": { window: { period: 4 } },
  "smallthinker": { window: { period: 4, isFullFirst: true } },
  "step35": { window: {} },

  "falcon-h1": { recurrent: "beside", state: "ssm" },
  "granitehybrid": { recurrent: "headless", state: "ssm" },
  "jamba": { recurrent: "headless", state: "ssm" },
  "lfm2": { recurrent: "headless", state: "shortconv" },
  "lfm2moe": { recurrent: "headless", state: "shortconv" },
  "mamba": { recurrent: "all", state: "ssm" },
  "mamba2": { recurrent: "all", state: "ssm" },
  "nemotron_h": { recurrent: "headless-without-ff", state: "ssm" },
  "nemotron_h_moe": { recurrent: "headless-without-ff", state: "ssm" },
  "plamo2": { recurrent: "headless", state: "ssm" },
  "qwen35": { recurrent: "interval", state: "ssm" },
  "qwen35moe": { recurrent: "interval", state: "ssm" },
  "qwen3next": { recurrent: "interval", state: "ssm" },
  "arwkv7": { recurrent: "all", state: "wkv", tokenShifts: 1 },
  "rwkv6": { recurrent: "all", state: "wkv", tokenShifts: 2 },
  "rwkv6qwen2": { recurrent: "all", state: "wkv", tokenShifts: 1 },
  "rwkv7": { recurrent: "all", state: "wkv", tokenShifts: 2 },

  "deepseek32": { isRefused: true },
  "deepseek4": { isRefused: true },
  "glm-dsa": { isRefused: true },
};

/** qwen3next and qwen35 without `full_attention_interval` (llama.cpp, 2026-09). */
const DEFAULT_ATTENTION_INTERVAL = 4;

/** Keys, without the architecture's name, whose arrays hold one entry a layer and are kept. */
const PER_LAYER_KEYS: readonly string[] = [
  "attention.head_count",
  "attention.head_count_kv",
  "attention.sliding_window_pattern",
  "feed_forward_length",
];

/** `model_type` of a Hugging Face config.json → the architecture's name in GGUF files, if another. */
// deno-fmt-ignore -- a table: a family a line.
const HF_ARCHITECTURES: ReadonlyMap<string, string> = new Map([
  ["cohere", "command-r"],
  ["deepseek_v2", "deepseek2"], ["deepseek_v3", "deepseek2"], ["deepseek_v32", "deepseek32"],
  ["falcon_h1", "falcon-h1"],
  ["gemma3_text", "gemma3"], ["gemma3n_text", "gemma3n"],
  ["glm4_moe", "glm4moe"], ["glm_moe_dsa", "glm-dsa"],
  ["gpt_oss", "gpt-oss"],
  ["granitemoehybrid", "granitehybrid"],
  ["kimi_k2", "deepseek2"],
  ["lfm2_moe", "lfm2moe"],
  ["llama4_text", "llama4"],
  ["minimax_m2", "minimax-m2"],
  ["mistral", "llama"], ["mixtral", "llama"],
  ["phi", "phi2"],
  ["qwen2_moe", "qwen2moe"],
  ["qwen3_5", "qwen35"], ["qwen3_5_moe", "qwen35moe"],
  ["qwen3_moe", "qwen3moe"], ["qwen3_next", "qwen3next"],
]);

/** What helps when a model cannot be measured. */
const DECLARE_HINT = "declare context_tokens of the model in models.json";
/** What helps when a model's file is damaged. */
const DAMAGED_HINT = "compare the file's checksum, or download it again";
/** What helps when nobody knows how much is free. */
const FREE_HINT = "vram-detect --free-mib N (what is free, in MiB)";
/** What helps when the window is too small. */
const RAISE_HINT = "vram-detect --explain says what would raise it; of a model that is loaded " +
  "already, declare context_tokens in models.json";

/** Real config files, indexes, manifests and headers of safetensors take a few MiB at most. */
const JSON_LIMIT_BYTES = 16 * MIB;

/** Where ollama's service keeps models on Linux (its install script, 2026-09). */
const OLLAMA_SERVICE_MODELS = "/usr/share/ollama/.ollama/models";

/** A probe that has not ended by then is killed. */
const PROBE_DEADLINE_MS = 5000;
/** A probe that prints more is killed; all of them print far less. */
const PROBE_OUTPUT_BYTES = 4 * MIB;
/** Where the probes are that the PATH of a scheduler lacks: WSL's driver, ROCm, macOS's sysctl. */
const PROBE_PATH = "/usr/lib/wsl/lib:/opt/rocm/bin:/usr/sbin";

const NOT_INSTALLED = "is not installed";

const NVIDIA_SMI = [
  "nvidia-smi",
  "--query-gpu=index,uuid,name,memory.total,memory.free",
  "--format=csv,noheader,nounits",
] as const;
const ROCM_SMI = ["rocm-smi", "--showmeminfo", "vram", "--json"] as const;
const APPLE_SYSCTL = ["sysctl", "hw.memsize", "hw.optional.arm64", "iogpu.wired_limit_mb"] as const;
const WINDOWS_REGISTRY = [
  "reg",
  "query",
  "HKLM\\SYSTEM\\CurrentControlSet\\Control\\Class\\{4d36e968-e325-11ce-bfc1-08002be10318}",
  "/s",
  "/v",
  "HardwareInformation.qwMemorySize",
] as const;
const WINDOWS_MEMORY = [
  "powershell",
  "-NoProfile",
  "-Command",
  '$m = Get-CimInstance Win32_OperatingSystem; "$($m.FreePhysicalMemory) $($m.TotalVisibleMemorySize)"',
] as const;

/** GPUs that share the machine's memory and therefore report none of their own (NVIDIA, 2026). */
const NVIDIA_UNIFIED = /\b(?:GB10|Thor|Orin)\b/;

/** What an index of CUDA_VISIBLE_DEVICES means is not certain (CUDA's programming guide, 12). */
const CUDA_ORDER_NOTE = "by its number in nvidia-smi; CUDA counts the fastest card first unless " +
  "CUDA_DEVICE_ORDER is PCI_BUS_ID";

/** An AMD GPU is an APU when it may borrow much more of the machine's memory than it owns. */
const APU_MIN_GTT_BYTES = 8 * GIB;
const APU_MIN_GTT_RATIO = 4;
const APU_MAX_VRAM_BYTES = 4 * GIB;

/** Share of memory that macOS lets the GPU use: larger machines allow more (llama.cpp and MLX discussions, 2025). */
const APPLE_SMALL_BYTES = 36 * GIB;
const APPLE_SMALL_SHARE = 2 / 3;
const APPLE_LARGE_SHARE = 3 / 4;

/** Limits of 2^62 and above mean "none" in cgroup v1, which has no word for it. */
const CGROUP_NO_LIMIT_BYTES = 2 ** 62;

/** Limit, use and droppable cache of a control group, in version 2 and in version 1. */
const CGROUP_FILES = [
  ["memory.max", "memory.current", "inactive_file"],
  ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"],
] as const;

/**
 * Prints what Linux tells about memory, each file under a line `==> path`, by one process instead of
 * one for each file. A container sees its own limits at the root of the tree, a session further
 * down: every folder on the way up is shown.
 */
const LINUX_FACTS_SCRIPT = `
show() {
  for file; do
    [ -f "$file" ] && [ -r "$file" ] && printf '\\n==> %s\\n' "$file" && cat "$file"
  done
}
show /proc/meminfo /proc/driver/nvidia/version
for card in /sys/class/drm/card[0-9] /sys/class/drm/card[0-9][0-9]; do
  show "$card"/device/vendor "$card"/device/uevent "$card"/device/mem_info_* "$card"/lmem_* \\
    "$card"/device/lmem_* "$card"/device/tile*/physical_vram_size_bytes
done
while IFS=: read -r id kinds path; do
  case $id:,$kinds, in
    0:,,) root=/sys/fs/cgroup ;;
    *,memory,*) root=/sys/fs/cgroup/memory ;;
    *) continue ;;
  esac
  path=\${path%/}
  while :; do
    show "$root$path"/memory.max "$root$path"/memory.current "$root$path"/memory.stat \\
      "$root$path"/memory.limit_in_bytes "$root$path"/memory.usage_in_bytes
    [ -n "$path" ] || break
    path=\${path%/*}
  done
done </proc/self/cgroup
` as const;

// --- Types ---

/**
 * A value of a model's header: texts, numbers, booleans as 0 and 1, one number per layer. Null stands
 * for one that is there and was stepped over.
 */
export type HeaderValue = string | number | readonly number[] | null;

/** What a model file says about its model, whatever its format. */
export interface ModelHeader {
  /** Key → value, with GGUF's key names. */
  values: ReadonlyMap<string, HeaderValue>;
  /** Rows of the vocabulary, or null when the file does not tell. */
  vocabTokens: number | null;
}

/** A GGUF file's header and what its tensors add up to. */
export interface GgufFile extends ModelHeader {
  version: number;
  tensorCount: number;
  /**
   * Bytes of all tensors without padding, and of what follows the last one beyond padding: such a
   * surplus may mean a damaged list of tensors.
   */
  weightsBytes: number;
  /** Normally 0. */
  surplusBytes: number;
  /** Bytes that were read to know this. */
  readBytes: number;
}

/** Random access to a file's bytes, so that the readers can be tested without files. */
export interface ByteSource {
  sizeBytes: number;
  /** Fills the start of `into` from `offset`; returns how many bytes there were. */
  readAt(offset: number, into: Uint8Array): number;
}

/** K and V elements of one head. */
export type HeadElements = readonly [key: number, value: number];

/** What one layer keeps: K and V elements of a cell, and the recurrent state of a slot. */
export interface LayerShape {
  /** 0 when the layer keeps none. */
  keyElements: number;
  /** 0 also with MLA, where V is part of K. */
  valueElements: number;
  /** Whether it holds only the sliding window. */
  isSliding: boolean;
  stateBytes: number;
}

/** What decides a model's memory. */
export interface ModelShape {
  /** The architecture's name in GGUF files. */
  architecture: string;
  layers: readonly LayerShape[];
  /** Window of the sliding layers, 0 where there are none. */
  windowTokens: number;
  embeddingElements: number;
  vocabTokens: number;
  /** Largest context the model was made for, or null when the file does not tell. */
  nativeTokens: number | null;
  /** K and V elements of a head, which the block of a cache type must divide: full, sliding. */
  headElements: readonly HeadElements[];
  /** Why the true need may be lower; empty when the figures are exact. */
  upperBounds: readonly string[];
}

/** A model as the solver sees it. */
export interface SizedModel {
  shape: ModelShape;
  /** Weights and projector. */
  weightsBytes: number;
}

/** How the model is run. */
export interface CacheSettings {
  /** A cache type's name. */
  kvTypeK: string;
  kvTypeV: string;
  /** Sequences at the same time; they share the full-context cells. */
  slots: number;
  /** Tokens of a physical batch. */
  ubatchTokens: number;
}

/** What a context needs, in bytes. */
export interface MemoryAtContext {
  context_tokens: number;
  /** Weights and projector. */
  weights_bytes: number;
  /** Layers that keep the whole context. */
  kv_bytes: number;
  /** Layers that keep the sliding window. */
  kv_swa_bytes: number;
  /** Recurrent state of all slots. */
  recurrent_bytes: number;
  compute_bytes: number;
  total_bytes: number;
}

/** What is known of one memory: free bytes, or null with the reason. */
export interface MemoryReading {
  total_bytes: number | null;
  free_bytes: number | null;
  unknown_reason: string | null;
  /** What a reader should know about the figures, for example that they are estimates. */
  note: string | null;
}

/** One device that is there. */
export interface DeviceReport extends MemoryReading {
  /** What tells it from the others: a card's uuid or name. */
  id: string;
  name: string;
  /** Whose memory it is: its own, shared with the machine, the machine itself, supposed. */
  kind: "discrete" | "integrated" | "cpu" | "what-if";
}

/** What one way of asking found: devices, or why there are none or they cannot be known. */
export interface ProbeReport {
  probe: string;
  state: "found" | "unknown" | "absent";
  /** Null when found. */
  reason: string | null;
  devices: DeviceReport[];
}

/** What a probing program printed, or why it did not. */
export type ProbeOutput = { code: number; stdout: string; stderr: string } | { problem: string };

/** One device's part of the budget. */
export interface BudgetTerm {
  device: string;
  free_bytes: number;
  /** What is kept back. */
  headroom_bytes: number;
  usable_bytes: number;
}

/** What the model may use, on which devices. */
export interface MemoryBudget {
  pool: DeviceReport["kind"];
  terms: BudgetTerm[];
  total_bytes: number;
}

/** The budget with the answer that it leads to. */
export interface BudgetReport extends MemoryBudget {
  /** The largest context that fits, before it is rounded down. */
  exact_context_tokens: number;
  native_context_tokens: number | null;
  /** What keeps the answer from being larger. */
  limited_by: "memory" | "the native context";
}

/** A model file that was found and read. */
export interface LoadedModel {
  source: "gguf" | "hf" | "ollama";
  path: string;
  files: number;
  header: ModelHeader;
  weightsBytes: number;
  projectorBytes: number;
  warnings: string[];
}

/** What `--json` prints; the field names are the contract. What is not known is null. */
export class DetectReport {
  readonly schema_version = 1;
  /** The answer. */
  available_context_tokens: number | null = null;
  /** The contract's old name for the same number: it counts tokens. */
  available_context_kb: number | null = null;
  loop_mode_eligible = false;
  readonly floor_tokens: number = FLOOR_TOKENS;
  /** Why there is no answer or why no loop may run. */
  reason: string | null = null;
  /** What to do about the reason. */
  hint: string | null = null;
  source: "env" | "models.json" | LoadedModel["source"] | "none" = "none";
  /** What was asked about. */
  model: Record<string, string | number | boolean | null> | null = null;
  devices: DeviceReport[] = [];
  /** How each way of asking for devices ended. */
  probes: Omit<ProbeReport, "devices">[] = [];
  /** Fixed terms of the derivation and those for each token. */
  memory: Record<string, number> | null = null;
  /** What the context of `--context` needs. */
  memory_at_context: MemoryAtContext | null = null;
  budget: BudgetReport | null = null;
  /** How the model is taken to be run. */
  assumptions: Record<string, string | number | boolean> | null = null;
  warnings: string[] = [];
}

/** The report, with what only the table for people shows. */
export interface Detection {
  report: DetectReport;
  /** What the answer's context needs, or null. */
  need: MemoryAtContext | null;
  /** What would raise the answer, one line each. */
  raises: string[];
}

/** The command line, checked; what was not given is null. */
interface DetectOptions {
  model: string | null;
  kvTypeK: string | null;
  kvTypeV: string | null;
  slots: number | null;
  ubatchTokens: number;
  contextTokens: number | null;
  freeMib: number | null;
}

// --- Shared ---

// #region shared:cli
/** One option of a command line. The table of these drives parsing, `--help` and the tests. */
export interface OptionSpec {
  /** Long name without the dashes. */
  readonly name: string;
  /** Placeholder of the value in `--help`; absent for a switch. */
  readonly value?: string;
  readonly help: string;
}

/** A command line that cannot be understood: exit code 2. */
export class UsageError extends Error {
  override name = "UsageError";
}

/** A request that is understood and refused or that failed: exit code 1. */
export class RefusedError extends Error {
  override name = "RefusedError";
  /** @param hint What to do next, one command where there is one. */
  constructor(message: string, readonly hint: string) {
    super(message);
  }
}

/**
 * Counts the single-character edits between two short words (Levenshtein distance).
 *
 * @example
 * ```ts
 * import { editDistance } from "./status.ts";
 * if (editDistance("loop", "lop") !== 1) throw new Error("wrong distance");
 * ```
 */
export function editDistance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, index) => index);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) {
      const substituted = row[j - 1]! + (a[i - 1] === b[j - 1] ? 0 : 1);
      next.push(Math.min(row[j]! + 1, next[j - 1]! + 1, substituted));
    }
    row = next;
  }
  return row[b.length]!;
}

/**
 * Returns the candidate closest to a word, or null when none is within half of its length.
 *
 * @example
 * ```ts
 * import { findNearest } from "./status.ts";
 * if (findNearest("--lop", ["--loop", "--json"]) !== "--loop") throw new Error("not found");
 * ```
 */
export function findNearest(word: string, candidates: readonly string[]): string | null {
  let best: string | null = null;
  let bestDistance = Math.max(2, Math.floor(word.length / 2)) + 1;
  for (const candidate of candidates) {
    const distance = editDistance(word.slice(0, 64), candidate);
    if (distance < bestDistance) [best, bestDistance] = [candidate, distance];
  }
  return best;
}

function rejectUnknown(argument: string, options: readonly OptionSpec[]): never {
  if (!argument.startsWith("-")) {
    throw new UsageError(`Cannot read argument "${argument}": every value follows a flag`);
  }
  const flag = argument.split("=", 1)[0]!;
  const names = options.map((option) => `--${option.name}`);
  if (names.includes(flag)) {
    throw new UsageError(`Cannot read flag "${flag}": its value is missing`);
  }
  const nearest = findNearest(flag, names);
  const suggestion = nearest === null ? "see --help" : `did you mean ${nearest}?`;
  throw new UsageError(`Cannot read flag "${flag}": unknown (${suggestion})`);
}

/**
 * Reads a command line against a table of options.
 *
 * @returns The options given: a string for those with a value, true for switches.
 * @throws {UsageError} For an unknown flag, a missing value or a stray argument.
 *
 * @example
 * ```ts
 * import { parseCommandLine } from "./status.ts";
 * const options = [{ name: "loop", value: "NAME", help: "" }, { name: "json", help: "" }];
 * const given = parseCommandLine(["--loop=night", "--json"], options);
 * if (given.get("loop") !== "night" || given.get("json") !== true) throw new Error("misread");
 * ```
 */
export function parseCommandLine(
  args: readonly string[],
  options: readonly OptionSpec[],
): Map<string, string | true> {
  const valued = options.filter((option) => option.value !== undefined).map((o) => o.name);
  const switches = options.filter((option) => option.value === undefined).map((o) => o.name);
  const misused = switches.find((name) => args.some((word) => word.startsWith(`--${name}=`)));
  if (misused !== undefined) {
    throw new UsageError(`Cannot read flag "--${misused}": it takes no value`);
  }
  const parsed: Record<string, unknown> = parseArgs([...args], {
    string: [...valued, "_"],
    boolean: switches,
    unknown: (argument: string) => rejectUnknown(argument, options),
  });
  const strays = parsed._;
  if (Array.isArray(strays) && strays.length > 0) rejectUnknown(`${strays[0]}`, options);
  const given = new Map<string, string | true>();
  for (const name of valued) {
    const value = parsed[name];
    if (value === undefined) continue;
    if (typeof value !== "string" || value === "") {
      throw new UsageError(`Cannot read flag "--${name}": its value is missing`);
    }
    if (value.includes("\0")) throw new UsageError(`Cannot read flag "--${name}": a NUL byte`);
    given.set(name, value);
  }
  for (const name of switches) if (parsed[name] === true) given.set(name, true);
  return given;
}

/**
 * Reads an option's value as a whole number within bounds; undefined when it was not given.
 *
 * @example
 * ```ts
 * import { readWholeNumber } from "./status.ts";
 * const lines = readWholeNumber(new Map([["lines", "20"]]), "lines", { min: 1, max: 100 });
 * if (lines !== 20) throw new Error("misread");
 * ```
 */
export function readWholeNumber(
  given: ReadonlyMap<string, string | true>,
  name: string,
  { min, max }: { min: number; max: number },
): number | undefined {
  const text = given.get(name);
  if (text === undefined) return undefined;
  const value = /^\d{1,15}$/.test(`${text}`) ? Number(text) : NaN;
  if (value >= min && value <= max) return value;
  throw new UsageError(
    `Cannot read flag "--${name}": "${text}" is not a whole number from ${min} to ${max}`,
  );
}

/**
 * Lays out option lines for `--help`: flag and placeholder, then what it does.
 *
 * @example
 * ```ts
 * import { renderOptions } from "./status.ts";
 * const text = renderOptions([{ name: "lines", value: "N", help: "how many" }]);
 * if (text !== "  --lines N  how many\n") throw new Error(text);
 * ```
 */
export function renderOptions(options: readonly OptionSpec[]): string {
  const label = ({ name, value }: OptionSpec) =>
    `--${name}${value === undefined ? "" : ` ${value}`}`;
  const width = Math.max(...options.map((option) => label(option).length));
  return options.map((option) => `  ${label(option).padEnd(width)}  ${option.help}\n`).join("");
}

/** What to do about a failure; nothing for a usage error, whose one line says it all. */
function findHint(error: unknown): string | undefined {
  if (error instanceof UsageError) return undefined;
  if (error instanceof RefusedError) return error.hint;
  const isAboutContent = error instanceof SyntaxError || error instanceof TypeError;
  return isAboutContent
    ? "correct that file and try again"
    : "check who may read and write there, and that there is room left";
}

/** Prints how a program failed, in words on stderr and for `--json` as the last line of stdout. */
export function reportFailure(error: unknown, program: string, args: readonly string[]): number {
  const words = (error instanceof Error ? error.message : `${error}`).replace(/\p{Cc}+/gu, " ");
  // How Deno words what the system refused (2.6 and 2.9): "<problem> (os error <n>): <verb> '<path>'".
  const [, problem, verb, path] = /^(.+) \(os error \d+\): (\w+) '(.+)'$/.exec(words) ?? [];
  const message = path !== undefined
    ? `Cannot ${verb} "${path.replace("' -> '", '" to "')}": ${problem}`
    : words.startsWith("Cannot ")
    ? words
    : `Cannot go on: ${words}`;
  const hint = findHint(error);
  console.error(`${program}: ${message}`);
  if (hint !== undefined) console.error(`hint: ${hint}`);
  if (args.includes("--json")) {
    console.log(
      JSON.stringify({ schema_version: 1, ok: false, error: message, hint: hint ?? null }),
    );
  }
  return error instanceof UsageError ? 2 : 1;
}
// #endregion shared:cli

// #region shared:framework
/** What names of tasks, loops and templates look like; checked before a path is built from one. */
export const NAME_PATTERN = /^[a-z0-9][a-z0-9-]{0,62}$/;

/** Reads an environment variable; an empty one counts as absent. */
export function readEnv(name: string): string | undefined {
  return Deno.env.get(name) || undefined;
}

/** The checkout that holds scripts/, prompts/ and templates/ (also behind links, also compiled). */
export function findFrameworkDir(scriptUrl: string): string {
  const declared = readEnv("AUTOMATON_HOME");
  if (declared !== undefined) return resolve(declared);
  const program = Deno.build.standalone ? Deno.execPath() : fromFileUrl(scriptUrl);
  return dirname(dirname(Deno.realPathSync(program)));
}

/**
 * Finds the project folder: the flag, else AUTOMATON_PROJECT, else the nearest ancestor of the
 * working directory that holds `.automaton/`.
 *
 * @param mayCreate True for commands that make `.automaton/` in a project named outright.
 * @throws {RefusedError} Where there is no such folder.
 */
export function findProjectDir(flag: string | undefined, mayCreate: boolean): string {
  const named = flag ?? readEnv("AUTOMATON_PROJECT");
  if (named !== undefined) {
    const path = resolve(named);
    if (!isDirectory(path)) {
      throw new RefusedError(`Cannot open project "${path}": no such folder`, "check --project");
    }
    if (isProject(path)) return path;
    if (isDirectory(join(path, ".automaton"))) {
      throw new RefusedError(
        `Cannot open project "${path}": its .automaton is a checkout of Automaton`,
        "name another folder with --project",
      );
    }
    if (mayCreate) return path;
    throw new RefusedError(
      `Cannot open project "${path}": it holds no .automaton folder`,
      "status --create-task NAME --project DIR makes one",
    );
  }
  for (let path = Deno.cwd();; path = dirname(path)) {
    if (isProject(path)) return path;
    if (dirname(path) === path) break;
  }
  throw new RefusedError(
    `Cannot find a project from "${Deno.cwd()}": no folder above it holds .automaton`,
    "name it with --project DIR",
  );
}

/** True for a folder with a project's `.automaton`; a home folder may hold a checkout of that name. */
function isProject(path: string): boolean {
  const store = join(path, ".automaton");
  return isDirectory(store) && !isDirectory(join(store, "templates", "loops"));
}

/** True when a path leads to a folder; false when to anything else or nothing. */
export function isDirectory(path: string): boolean {
  try {
    return Deno.statSync(path).isDirectory;
  } catch {
    return false; // Missing, unreadable or a loop of links: not a folder that can be used.
  }
}

/** The framework's version from its config.md; "unknown" where that cannot be read. */
export function readVersion(frameworkDir: string): string {
  const text = readTextIfPresent(join(frameworkDir, "config.md")) ?? "";
  return /^version:\s*(\S+)/m.exec(text)?.[1] ?? "unknown";
}

/**
 * A file's text, or null when there is no such file.
 *
 * @throws {TypeError} For a folder, a pipe or a device, which may never end.
 */
export function readTextIfPresent(path: string): string | null {
  try {
    if (Deno.statSync(path).isFile) return Deno.readTextFileSync(path);
  } catch (error) {
    if (error instanceof Deno.errors.NotFound || error instanceof Deno.errors.NotADirectory) {
      return null;
    }
    throw error;
  }
  throw new TypeError(`Cannot read "${path}": it is no regular file`);
}
// #endregion shared:framework

// #region shared:fields
/**
 * One rule about a field of a JSON object: its dotted path (`*` stands for every key), what it must be
 * in words, the test, and whether it may be absent.
 */
export type FieldRule = readonly [
  path: string,
  want: string,
  holds: (value: unknown) => boolean,
  presence?: "required",
];

/**
 * True for a JSON object: not null, not an array.
 *
 * @example
 * ```ts
 * import { isRecord } from "./status.ts";
 * if (!isRecord({}) || isRecord([]) || isRecord(null)) throw new Error("wrong");
 * ```
 */
export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/**
 * Shortens any value to what fits in one line of an error message.
 *
 * @example
 * ```ts
 * import { describeValue } from "./status.ts";
 * if (describeValue({ a: [1] }) !== '{"a":[1]}') throw new Error("wrong");
 * ```
 */
export function describeValue(value: unknown): string {
  if (value === undefined) return "nothing";
  const text = JSON.stringify(value) ?? typeof value;
  return text.length > 60 ? `${text.slice(0, 57)}...` : text;
}

function listAtPath(root: unknown, path: string): [string, unknown][] {
  let found: [string, unknown][] = [["", root]];
  for (const key of path.split(".")) {
    found = found.flatMap(([prefix, value]): [string, unknown][] => {
      if (!isRecord(value)) return [];
      const keys = key === "*" ? Object.keys(value) : [key];
      return keys.map((k) => [prefix === "" ? k : `${prefix}.${k}`, value[k]]);
    });
  }
  return found;
}

/**
 * Checks a parsed JSON value against rules. An absent optional field passes; null does not, unless
 * its rule holds for null.
 *
 * @throws {TypeError} Names the file, the field, what was found and what was wanted.
 *
 * @example
 * ```ts
 * import { checkFields, type FieldRule } from "./status.ts";
 * const rules: FieldRule[] = [["tick", "a number", (value) => typeof value === "number", "required"]];
 * checkFields({ tick: 1, more: true }, rules, "a file");
 * ```
 */
export function checkFields(
  root: unknown,
  rules: readonly FieldRule[],
  where: string,
): asserts root is Record<string, unknown> {
  if (!isRecord(root)) {
    throw new TypeError(`Cannot use "${where}": found ${describeValue(root)}, wanted an object`);
  }
  for (const [pattern, want, holds, presence] of rules) {
    for (const [path, value] of listAtPath(root, pattern)) {
      if (value === undefined ? presence === undefined : holds(value)) continue;
      throw new TypeError(
        `Cannot use "${where}": field ${path}: found ${describeValue(value)}, wanted ${want}`,
      );
    }
  }
}

/**
 * Parses JSON (or JSONC by `parse`) and says where it came from when it does not parse.
 *
 * @example
 * ```ts
 * import { parseJsonText } from "./status.ts";
 * if (parseJsonText("[1]", "a file")?.toString() !== "1") throw new Error("misread");
 * ```
 */
export function parseJsonText(
  text: string,
  where: string,
  parse: (text: string) => unknown = JSON.parse,
): unknown {
  const fail = (detail: string) => new SyntaxError(`Cannot parse "${where}": ${detail}`);
  if (text.length > MAX_JSON_CHARS) {
    throw fail(`it is larger than ${MAX_JSON_CHARS / 1024 / 1024} MiB`);
  }
  let value: unknown;
  try {
    value = parse(text.replace(/^\uFEFF/, ""));
  } catch (error) {
    if (error instanceof RangeError) throw fail(TOO_DEEP);
    // deno-lint-ignore no-control-regex -- the message quotes the text, whatever is in it.
    const words = (error as Error).message.replace(/[\u0000-\u001f\u007f-\u009f]+/g, "?");
    throw fail(text.trim() === "" ? "it is empty" : words);
  }
  const count = countFields(value);
  if (count === null) throw fail(TOO_DEEP);
  if ((text.match(/"\s*:/g)?.length ?? 0) !== count) {
    const field = findRepeatedField(text);
    if (field !== null) throw fail(`the field ${describeValue(field)} stands twice in one object`);
  }
  return value;
}

/** Larger and deeper than any file of ours; beyond, checking and saving would exhaust the memory. */
const MAX_JSON_CHARS = 32 * 1024 * 1024;
const MAX_JSON_DEPTH = 100;
const TOO_DEEP = `it is nested deeper than ${MAX_JSON_DEPTH} levels`;

/** How many fields the objects in a JSON value have; null when it is nested too deeply. */
function countFields(value: unknown, depth = 0): number | null {
  if (typeof value !== "object" || value === null) return 0;
  if (depth > MAX_JSON_DEPTH) return null;
  let count = Array.isArray(value) ? 0 : Object.keys(value).length;
  for (const inner of Object.values(value)) {
    const below = countFields(inner, depth + 1);
    if (below === null) return null;
    count += below;
  }
  return count;
}

/**
 * The first field that stands twice in one object; null when there is none. Readers differ in which of
 * the two counts, so neither does.
 *
 * @param text JSON or JSONC that has been parsed.
 */
function findRepeatedField(text: string): string | null {
  const open: (Set<string> | null)[] = [];
  let name = "";
  for (let at = 0; at < text.length; at++) {
    const char = text[at]!;
    if (char === '"') {
      const start = at;
      for (at++; at < text.length && text[at] !== '"'; at++) if (text[at] === "\\") at++;
      name = text.slice(start + 1, at);
    } else if (text.startsWith("//", at)) {
      const end = text.indexOf("\n", at);
      at = end < 0 ? text.length : end;
    } else if (text.startsWith("/*", at)) at = text.indexOf("*/", at + 2) + 1;
    else if (char === "{" || char === "[") open.push(char === "{" ? new Set() : null);
    else if (char === "}" || char === "]") open.pop();
    else if (char === ":") {
      if (open.at(-1)?.has(name)) return name;
      open.at(-1)?.add(name);
    }
  }
  return null;
}
// #endregion shared:fields

// #region shared:models
/** One model of models.json. */
export interface ModelEntry {
  readonly context_tokens?: number;
  readonly local?: boolean;
  readonly gguf?: string;
  readonly mmproj?: string;
  readonly kv_type?: string;
  readonly slots?: number;
}

/** models.json: which models there are and which of them count as the same. */
export interface ModelsFile {
  readonly path: string;
  readonly default?: string;
  readonly models: Readonly<Record<string, ModelEntry>>;
  readonly conflicts?: readonly (readonly [string, string])[];
}

const isPositiveInteger = (value: unknown): boolean =>
  Number.isSafeInteger(value) && Number(value) > 0;

// deno-fmt-ignore -- a table: one row a line.
const MODELS_RULES: readonly FieldRule[] = [
  ["models", "an object of models", isRecord, "required"],
  ["models.*", "an object", isRecord],
  ["models.*.context_tokens", "a whole number above 0", isPositiveInteger],
  ["models.*.local", "true or false", (v) => typeof v === "boolean"],
  ["models.*.gguf", "a path", (v) => typeof v === "string" && v !== ""],
  ["models.*.mmproj", "a path", (v) => typeof v === "string" && v !== ""],
  ["models.*.kv_type", "a type's name", (v) => typeof v === "string"],
  ["models.*.slots", "a whole number above 0", isPositiveInteger],
  ["default", "a model's name", (v) => typeof v === "string" && v !== ""],
  ["conflicts", "a list of pairs of model names", (v) => Array.isArray(v) && v.every((pair) => Array.isArray(pair) && pair.length === 2 && pair.every((name) => typeof name === "string") )],
];

/**
 * Reads `<project>/.automaton/models.json`, else `<framework>/models.json` (JSONC accepted).
 *
 * @returns null when there is neither.
 * @throws {SyntaxError|TypeError} For a file that is there and cannot be used.
 */
export function readModels(projectDir: string, frameworkDir: string): ModelsFile | null {
  const candidates = [
    join(projectDir, ".automaton", "models.json"),
    join(frameworkDir, "models.json"),
  ];
  for (const path of candidates) {
    const text = readTextIfPresent(path);
    if (text === null) continue;
    const parsed = parseJsonText(text, path, parseJsonc);
    checkFields(parsed, MODELS_RULES, path);
    const fields = parsed as unknown as Omit<ModelsFile, "path">;
    return { ...fields, path };
  }
  return null;
}
// #endregion shared:models

// --- Pure helpers ---

/** A refusal with what helps whenever a model cannot be measured: saying what its window is. */
function refusal(message: string, hint = DECLARE_HINT): RefusedError {
  return new RefusedError(message, hint);
}

/** A refusal of a header that does not say what a model keeps. */
function unsizable(found: string): RefusedError {
  return refusal(`Cannot size model: ${found}`);
}

function sumOf<T>(items: readonly T[], measure: (item: T) => number): number {
  return items.reduce((sum, item) => sum + measure(item), 0);
}

function padTo(value: number, step: number): number {
  return Math.ceil(value / step) * step;
}

function roundContext(tokens: number): number {
  return Math.floor(tokens / CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS;
}

function formatOf(cacheType: string): BlockFormat {
  const format = KV_TYPES.includes(cacheType)
    ? BLOCK_FORMATS.find(([, name]) => name === cacheType)
    : undefined;
  if (format !== undefined) return format;
  throw refusal(`Cannot use cache type "${cacheType}": it is none of ${KV_TYPES.join(", ")}`);
}

/**
 * What a model needs for a context, term by term.
 *
 * Source of the formulas: llama.cpp's llama-kv-cache, llama-kv-cache-iswa (the window's cells:
 * window·slots + ubatch, padded to 256), llama-memory-recurrent and the logs of its compute
 * buffers with flash attention, 2026-09.
 *
 * @param contextTokens Cells of the full-context layers, at least 0.
 *
 * @example
 * ```ts
 * import { assertEquals } from "@std/assert";
 * const layer = { keyElements: 1024, valueElements: 1024, isSliding: false, stateBytes: 0 };
 * const shape = {
 *   architecture: "llama", layers: Array(32).fill(layer), windowTokens: 0, embeddingElements: 4096,
 *   vocabTokens: 128256, nativeTokens: 8192, headElements: [], upperBounds: [],
 * };
 * const settings = { kvTypeK: "f16", kvTypeV: "f16", slots: 1, ubatchTokens: 512 };
 * assertEquals(memoryAtContext({ shape, weightsBytes: 0 }, settings, 8192).kv_bytes, 2 ** 30);
 * ```
 */
export function memoryAtContext(
  { shape, weightsBytes }: SizedModel,
  settings: CacheSettings,
  contextTokens: number,
): MemoryAtContext {
  const windowCells = shape.windowTokens * settings.slots + settings.ubatchTokens;
  const slidingCells = padTo(Math.min(contextTokens, windowCells), CONTEXT_STEP_TOKENS);
  const memory = {
    context_tokens: contextTokens,
    weights_bytes: weightsBytes,
    kv_bytes: bytesPerCell(shape, settings, false) * contextTokens,
    kv_swa_bytes: bytesPerCell(shape, settings, true) * slidingCells,
    recurrent_bytes: sumOf(shape.layers, (layer) => layer.stateBytes) * settings.slots,
    compute_bytes: 4 * settings.ubatchTokens *
      (shape.embeddingElements + shape.vocabTokens + contextTokens),
  };
  const { context_tokens: _, ...terms } = memory;
  return { ...memory, total_bytes: sumOf(Object.values(terms), (bytes) => bytes) };
}

/** K and V bytes of one cell, summed over the layers that slide or over those that do not. */
function bytesPerCell(shape: ModelShape, settings: CacheSettings, isSliding: boolean): number {
  const rowBytes = ([, , elements, bytes]: BlockFormat, count: number) => count / elements * bytes;
  const [k, v] = [formatOf(settings.kvTypeK), formatOf(settings.kvTypeV)];
  const layers = shape.layers.filter((layer) => layer.isSliding === isSliding);
  return sumOf(
    layers,
    (layer) => rowBytes(k, layer.keyElements) + rowBytes(v, layer.valueElements),
  );
}

/**
 * The largest context whose memory fits.
 *
 * @param budgetBytes What may be used.
 * @returns Tokens, never above the model's native context; 0 when not even one fits.
 */
export function largestContext(
  model: SizedModel,
  settings: CacheSettings,
  budgetBytes: number,
): number {
  let fits = 0;
  let tooLarge = (model.shape.nativeTokens ?? LARGEST_COUNT) + 1;
  while (tooLarge - fits > 1) {
    const middle = Math.floor((fits + tooLarge) / 2);
    if (memoryAtContext(model, settings, middle).total_bytes <= budgetBytes) fits = middle;
    else tooLarge = middle;
  }
  return fits;
}

/**
 * Chooses the pool of memory that a model would use and keeps the headroom back, here and nowhere
 * else. Pools are never added: cards of their own count before a GPU that shares the machine's
 * memory, and that before the machine's memory itself. A card whose memory is unknown is not taken
 * for absent: where no other card answers, there is no budget.
 *
 * @param devices All devices found.
 * @returns The budget; a device with less free than its headroom adds nothing.
 * @throws {RefusedError} When the free memory of no device of the pool is known.
 *
 * @example
 * ```ts
 * import { assertEquals } from "@std/assert";
 * const card = { id: "0", name: "card", kind: "discrete" as const, unknown_reason: null, note: null };
 * const gib = 2 ** 30;
 * const budget = computeBudget([{ ...card, total_bytes: 24 * gib, free_bytes: 20 * gib }]);
 * assertEquals(budget.total_bytes, 19 * gib);
 * ```
 */
export function computeBudget(devices: readonly DeviceReport[]): MemoryBudget {
  for (const pool of ["what-if", "discrete", "integrated", "cpu"] as const) {
    // A card too small to hold anything (a screen's 512 MiB) is no place for a model.
    const members = devices.filter((device) =>
      device.kind === pool &&
      (pool !== "discrete" || device.total_bytes === null || device.total_bytes > HEADROOM_BYTES)
    );
    const terms = members.flatMap((device) => budgetTerm(device) ?? []);
    // Several integrated entries are views of the same memory: the largest counts.
    if (pool === "integrated") terms.sort((a, b) => b.usable_bytes - a.usable_bytes).splice(1);
    if (terms.length > 0) {
      return { pool, terms, total_bytes: sumOf(terms, (term) => term.usable_bytes) };
    }
    const unknown = members[0];
    if (unknown !== undefined) {
      throw refusal(
        `free memory of ${unknown.name} is unknown: ${unknown.unknown_reason}`,
        FREE_HINT,
      );
    }
  }
  throw refusal("no device was found whose memory could hold a model", FREE_HINT);
}

function budgetTerm(device: DeviceReport): BudgetTerm | null {
  if (device.free_bytes === null) return null;
  const total = device.total_bytes ?? device.free_bytes;
  const headroom = Math.max(HEADROOM_BYTES, Math.ceil(total * HEADROOM_SHARE));
  return {
    device: device.name,
    free_bytes: device.free_bytes,
    headroom_bytes: headroom,
    usable_bytes: Math.max(0, device.free_bytes - headroom),
  };
}

function findArchitectureRule(architecture: string): ArchitectureRule {
  if (Object.hasOwn(SPECIAL_ARCHITECTURES, architecture)) {
    return SPECIAL_ARCHITECTURES[architecture]!;
  }
  return PLAIN_ARCHITECTURES.includes(architecture) ? {} : { isUnknown: true };
}

/** The numbers of one architecture in a header, checked; keys go without its name. */
class HeaderReader {
  readonly architecture: string;
  readonly rule: ArchitectureRule;
  readonly layerCount: number;
  readonly upperBounds: string[] = [];

  constructor(readonly header: ModelHeader) {
    const architecture = header.values.get("general.architecture");
    if (typeof architecture !== "string" || architecture === "") {
      throw unsizable("general.architecture is missing");
    }
    this.architecture = architecture;
    this.rule = findArchitectureRule(architecture);
    this.layerCount = this.count("block_count") - this.count("nextn_predict_layers", 0);
    if (this.layerCount < 1 || this.layerCount > GGUF_LIMITS.layers) {
      throw unsizable(`${this.layerCount} layers`);
    }
  }

  value(key: string): HeaderValue | undefined {
    return this.header.values.get(`${this.architecture}.${key}`);
  }

  has(key: string): boolean {
    return this.value(key) !== undefined;
  }

  /** A whole number from 0 to 2^31, or `fallback` where the key is missing. */
  count(key: string, fallback?: number): number {
    const value = this.has(key) ? this.value(key) : fallback;
    if (value === undefined) throw this.#refuse(key, "is missing");
    return this.#check(key, value);
  }

  /** The same, but not 0. */
  size(key: string, fallback?: number): number {
    const size = this.count(key, fallback);
    if (size > 0) return size;
    throw this.#refuse(key, "is 0");
  }

  /** One whole number for each layer, or null where the key is missing. */
  perLayer(key: string): number[] | null {
    const value = this.value(key);
    if (value === undefined) return null;
    const isList = typeof value === "object" && value !== null;
    const list = isList ? value : Array<HeaderValue>(this.layerCount).fill(value);
    if (list.length >= this.layerCount) {
      return list.slice(0, this.layerCount).map((item) => this.#check(key, item));
    }
    throw this.#refuse(key, `has ${list.length} entries for ${this.layerCount} layers`);
  }

  #check(key: string, value: HeaderValue | undefined): number {
    const isCount = typeof value === "number" && Number.isInteger(value) && value >= 0 &&
      value <= LARGEST_COUNT;
    if (isCount) return value;
    throw this.#refuse(key, value === null ? "is no number" : `is ${describeValue(value)}`);
  }

  #refuse(key: string, found: string): RefusedError {
    return unsizable(`${this.architecture}.${key} ${found}`);
  }
}

/**
 * What a header says about memory: the layers with what each keeps, the window, the vocabulary.
 *
 * Source: the load_hparams of llama.cpp's architectures and llama-hparams.cpp, 2026-09.
 *
 * @param header A model's header, GGUF's key names.
 * @throws {RefusedError} When a number is missing or out of range, or when the architecture keeps
 * something whose size is not known (an indexer's cache, an unknown recurrent state).
 */
export function describeModel(header: ModelHeader): ModelShape {
  const reader = new HeaderReader(header);
  const { architecture, upperBounds } = reader;
  refuseUnknownCaches(reader);
  if (reader.rule.isUnknown) {
    upperBounds.push(`architecture "${architecture}" is not known: every layer counts as full`);
  }
  const heads = readHeads(reader);
  const window = readWindow(reader);
  const layers = readLayers(reader, heads, window.isSliding);
  if (layers.every((layer) => layer.keyElements === 0 && layer.stateBytes === 0)) {
    throw unsizable("none of its layers keeps anything of a context");
  }
  return {
    architecture,
    layers,
    windowTokens: window.tokens,
    embeddingElements: reader.size("embedding_length"),
    vocabTokens: readVocab(reader),
    nativeTokens: reader.has("context_length") ? reader.size("context_length") : null,
    headElements: [heads.full, heads.sliding],
    upperBounds,
  };
}

function refuseUnknownCaches({ architecture, rule, header }: HeaderReader): void {
  const keys = [...header.values.keys()];
  const indexer = keys.find((key) => key.startsWith(`${architecture}.attention.indexer.`));
  if (rule.isRefused || indexer !== undefined) {
    const sign = indexer ?? `architecture "${architecture}"`;
    throw unsizable(`${sign} means an indexer with a cache of its own, whose size is not known`);
  }
  const state = keys.find((key) => /^[^.]+\.(?:ssm|wkv|kda|shortconv)\./.test(key));
  if (rule.isUnknown && state !== undefined) {
    throw unsizable(
      `architecture "${architecture}" is not known, ${state} means a recurrent state`,
    );
  }
}

/** How many heads hold KV on each layer, and the elements of one. */
interface HeadCounts {
  kv: readonly number[];
  full: HeadElements;
  sliding: HeadElements;
}

function readHeads(reader: HeaderReader): HeadCounts {
  const { rule, layerCount } = reader;
  if (rule.recurrent === "all") {
    return { kv: Array<number>(layerCount).fill(0), full: [0, 0], sliding: [0, 0] };
  }
  const query = reader.perLayer("attention.head_count");
  const kv = reader.perLayer("attention.head_count_kv") ?? query;
  if (kv === null) throw unsizable(`${reader.architecture}.attention.head_count is missing`);
  const mostHeads = Math.max(0, ...query ?? []);
  const embedding = reader.size("embedding_length");
  const derived = mostHeads > 0 ? Math.floor(embedding / mostHeads) : undefined;
  const key = reader.size("attention.key_length", derived);
  const value = reader.size("attention.value_length", derived);
  const hasKeyMla = reader.has("attention.key_length_mla");
  if (hasKeyMla !== reader.has("attention.value_length_mla")) {
    throw unsizable("only one of the two _mla lengths is there");
  }
  const keepsValues = !hasKeyMla || rule.isUnknown;
  return {
    kv: rule.isUnknown ? kv.map(() => Math.max(...kv)) : kv,
    full: [key, keepsValues ? value : 0],
    sliding: [
      reader.size("attention.key_length_swa", key),
      keepsValues ? reader.size("attention.value_length_swa", value) : 0,
    ],
  };
}

/** The sliding window of a model and the layers that use it. */
function readWindow(reader: HeaderReader): { tokens: number; isSliding: readonly boolean[] } {
  const { rule: { window: rule }, layerCount } = reader;
  const none = { tokens: 0, isSliding: Array<boolean>(layerCount).fill(false) };
  if (rule === undefined || (rule.onlyLayers ?? layerCount) !== layerCount) return none;
  const unstated = rule.fixedTokens ?? rule.defaultTokens ?? 0;
  const stated = reader.count("attention.sliding_window", unstated);
  if (stated === 0) return none;
  const tokens = rule.fixedTokens ?? stated;
  const key = "attention.sliding_window_pattern";
  if (typeof reader.value(key) === "object") {
    return { tokens, isSliding: (reader.perLayer(key) ?? []).map((flag) => flag !== 0) };
  }
  if (!reader.has(key) && rule.period === undefined) {
    reader.upperBounds.push("the file does not say which layers slide: every layer counts as full");
    return none;
  }
  const period = reader.count(key, rule.period);
  return { tokens, isSliding: none.isSliding.map((_, layer) => slides(layer, period, rule)) };
}

function slides(layer: number, period: number, rule: WindowRule): boolean {
  if (period === 0) return true;
  return rule.isFullFirst ? layer % period !== 0 : layer % period < period - 1;
}

function readLayers(
  reader: HeaderReader,
  heads: HeadCounts,
  isSliding: readonly boolean[],
): LayerShape[] {
  const { rule, layerCount } = reader;
  const recurrent = findRecurrentLayers(reader, heads.kv);
  const stateBytes = rule.state === undefined ? 0 : readStateBytes(reader, rule.state);
  const sharedByDefault = Math.max(0, layerCount - (rule.defaultKvLayers ?? layerCount));
  const shared = rule.isUnknown ? 0 : reader.count("attention.shared_kv_layers", sharedByDefault);
  return heads.kv.map((kvHeads, layer) => {
    const isRecurrent = recurrent[layer] ?? false;
    const attends = layer < layerCount - shared && (!isRecurrent || rule.recurrent === "beside");
    const [key, value] = isSliding[layer] ? heads.sliding : heads.full;
    return {
      keyElements: attends ? key * kvHeads : 0,
      valueElements: attends ? value * kvHeads : 0,
      isSliding: isSliding[layer] ?? false,
      stateBytes: isRecurrent ? stateBytes : 0,
    };
  });
}

function findRecurrentLayers(reader: HeaderReader, kvHeads: readonly number[]): boolean[] {
  switch (reader.rule.recurrent) {
    case "all":
    case "beside":
      return kvHeads.map(() => true);
    case "headless":
      return kvHeads.map((heads) => heads === 0);
    case "headless-without-ff": {
      const ff = reader.perLayer("feed_forward_length");
      return kvHeads.map((heads, layer) => heads === 0 && !ff?.[layer]);
    }
    case "interval": {
      const interval = reader.size("full_attention_interval", DEFAULT_ATTENTION_INTERVAL);
      return kvHeads.map((_, layer) => (layer + 1) % interval !== 0);
    }
    default:
      return kvHeads.map(() => false);
  }
}

/** Bytes of one layer's recurrent state for one slot, whatever the context; numbers are f32. */
function readStateBytes(reader: HeaderReader, kind: "ssm" | "shortconv" | "wkv"): number {
  const embedding = reader.size("embedding_length");
  switch (kind) {
    case "shortconv":
      return 4 * embedding * (reader.size("shortconv.l_cache") - 1);
    case "wkv":
      return 4 * embedding * ((reader.rule.tokenShifts ?? 0) + reader.size("wkv.head_size"));
    case "ssm": {
      const inner = reader.size("ssm.inner_size");
      const state = reader.size("ssm.state_size");
      const groups = reader.count("ssm.group_count", 0);
      const columns = reader.size("ssm.conv_kernel") - 1;
      return 4 * (columns * (inner + 2 * groups * state) + state * inner);
    }
  }
}

function readVocab(reader: HeaderReader): number {
  if (reader.header.vocabTokens) return reader.header.vocabTokens;
  if (reader.has("vocab_size")) return reader.size("vocab_size");
  reader.upperBounds.push(`no vocabulary is named: ${LARGEST_VOCAB_TOKENS} tokens are assumed`);
  return LARGEST_VOCAB_TOKENS;
}

/** A cache type that llama.cpp would refuse, in words: its blocks must fill a head. */
function findOddCacheType(shape: ModelShape, { kvTypeK, kvTypeV }: CacheSettings): string | null {
  const parts = shape.headElements.flatMap(([key, value]) =>
    [[kvTypeK, key], [kvTypeV, value]] as const
  );
  for (const [type, elements] of parts) {
    const [, , block] = formatOf(type);
    if (elements % block !== 0) {
      return `"${type}": its block of ${block} does not divide a head of ${elements}`;
    }
  }
  return null;
}

// --- Parsing and formatting ---

/** Walks through a GGUF header with a bounded window and a bounded number of bytes read. */
class GgufCursor {
  offset = 0;
  readBytes = 0;
  #window: Uint8Array;
  #view: DataView;
  #windowStart = 0;
  #windowBytes = 0;
  #decoder = new TextDecoder("utf-8", { fatal: true });

  constructor(readonly source: ByteSource, readonly path: string) {
    this.#window = new Uint8Array(Math.min(GGUF_LIMITS.windowBytes, Math.max(source.sizeBytes, 1)));
    this.#view = new DataView(this.#window.buffer);
  }

  get leftBytes(): number {
    return this.source.sizeBytes - this.offset;
  }

  /** The error for something wrong at `offset`. */
  refuse(found: string, offset = this.offset): RefusedError {
    const message = `Cannot read GGUF file "${this.path}": ${found} at offset ${offset}`;
    return refusal(message, DAMAGED_HINT);
  }

  /** Makes `bytes` bytes available and steps over them; returns where they start in the window. */
  #take(bytes: number, what: string): number {
    if (bytes > this.leftBytes) throw this.refuse(`the file ends inside ${what}`);
    const end = this.#windowStart + this.#windowBytes;
    if (this.offset < this.#windowStart || this.offset + bytes > end) this.#fill(bytes, what);
    const start = this.offset - this.#windowStart;
    this.offset += bytes;
    return start;
  }

  #fill(bytes: number, what: string): void {
    this.#windowStart = this.offset;
    this.#windowBytes = this.source.readAt(this.offset, this.#window);
    this.readBytes += this.#windowBytes;
    if (this.#windowBytes < bytes) throw this.refuse(`the file ends inside ${what}`);
    if (this.readBytes > GGUF_LIMITS.readBytes) {
      throw this.refuse(`the header is larger than ${GGUF_LIMITS.readBytes} bytes`);
    }
  }

  u32(what: string): number {
    return this.#view.getUint32(this.#take(4, what), true);
  }

  /** An unsigned 64-bit number; above 2^53 it is refused, no such length can be true. */
  u64(what: string): number {
    const start = this.#take(8, what);
    const high = this.#view.getUint32(start + 4, true);
    if (high >= 2 ** 21) throw this.refuse(`${what} is negative or above 2^53`, this.offset - 8);
    return high * 2 ** 32 + this.#view.getUint32(start, true);
  }

  /** A number of things of `bytesEach` bytes or more, bounded by what is left of the file. */
  length(what: string, bytesEach = 1): number {
    const length = this.u64(what);
    const start = this.offset - 8;
    if (length > GGUF_LIMITS.length) throw this.refuse(`${what} is ${length}, above 2^30`, start);
    if (length * bytesEach > this.leftBytes) {
      throw this.refuse(`${what} is ${length}, past the end of the file`, start);
    }
    return length;
  }

  text(bytes: number, what: string): string {
    const start = this.#take(bytes, what);
    try {
      return this.#decoder.decode(this.#window.subarray(start, start + bytes));
    } catch {
      throw this.refuse(`${what} is not UTF-8`, this.offset - bytes);
    }
  }

  skip(bytes: number): void {
    this.offset += bytes;
  }

  /** A value of one of the fixed-size types. */
  scalar(type: number, what: string): number {
    const format = GGUF_SCALARS[type];
    if (format === undefined) throw this.refuse(`${what} of type ${type}`, this.offset - 4);
    const [bytes, read] = format;
    const value = read(this.#view, this.#take(bytes, what));
    if (type !== GGUF_BOOL || value <= 1) return value;
    throw this.refuse(`${what} is a boolean of value ${value}`, this.offset - 1);
  }

  /** A name that must not be there twice. */
  newName(what: string, limitBytes: number, seen: Set<string>): string {
    const start = this.offset;
    const bytes = this.length(`the length of ${what}`);
    if (bytes === 0 || bytes > limitBytes) throw this.refuse(`${what} of ${bytes} bytes`, start);
    const name = this.text(bytes, what);
    if (seen.has(name)) throw this.refuse(`${what} "${name}" a second time`, start);
    seen.add(name);
    return name;
  }
}

/**
 * Reads a GGUF file's header: metadata that matters for memory and the sizes of its tensors. Big
 * arrays are stepped over; never more than 64 MiB are read and 64 KiB held.
 *
 * Source of the format: ggml's gguf.md and gguf.cpp, versions 2 and 3, checked 2026-09.
 *
 * @param path The file's path, for messages.
 * @throws {RefusedError} Names what is wrong and at which offset.
 */
export function readGguf(source: ByteSource, path: string): GgufFile {
  const cursor = new GgufCursor(source, path);
  const version = readGgufVersion(cursor);
  const tensorCount = cursor.length("the number of tensors");
  if (tensorCount > GGUF_LIMITS.tensors) throw cursor.refuse(`${tensorCount} tensors`, 8);
  const keyCount = cursor.length("the number of keys");
  if (keyCount > GGUF_LIMITS.keys) throw cursor.refuse(`${keyCount} keys`, 16);
  const { values, vocabTokens } = readGgufMetadata(cursor, keyCount);
  const tensors = readGgufTensors(cursor, tensorCount, readAlignment(cursor, values));
  const blocks = values.get(`${values.get("general.architecture")}.block_count`);
  if (typeof blocks === "number" && tensors.highestBlock >= blocks) {
    throw cursor.refuse(`tensors of block ${tensors.highestBlock}, but block_count ${blocks}`);
  }
  return {
    version,
    values,
    vocabTokens: vocabTokens ?? tensors.vocabTokens,
    tensorCount,
    weightsBytes: tensors.bytes + tensors.surplusBytes,
    surplusBytes: tensors.surplusBytes,
    readBytes: cursor.readBytes,
  };
}

function readGgufVersion(cursor: GgufCursor): number {
  const magic = cursor.u32("the magic number");
  // The four letters GGUF, read as a little-endian number.
  if (magic !== 0x46554747) throw cursor.refuse("no GGUF magic number", 0);
  const version = cursor.u32("the version");
  if ((version & 0xffff) === 0 && version !== 0) {
    throw cursor.refuse("a big-endian file (its bytes are swapped)", 4);
  }
  if (version === 2 || version === 3) return version;
  throw cursor.refuse(`version ${version}, only 2 and 3 are known`, 4);
}

function readGgufMetadata(cursor: GgufCursor, keyCount: number): ModelHeader {
  const values = new Map<string, HeaderValue>();
  const seen = new Set<string>();
  let vocabTokens: number | null = null;
  for (let index = 0; index < keyCount; index++) {
    const key = cursor.newName("a key", GGUF_LIMITS.keyBytes, seen);
    const type = cursor.u32(`the type of "${key}"`);
    if (type === GGUF_ARRAY) {
      const { length, items } = readGgufArray(cursor, key);
      if (key === "tokenizer.ggml.tokens") vocabTokens = length;
      values.set(key, items);
    } else if (type === GGUF_STRING) values.set(key, readGgufText(cursor, key));
    else values.set(key, cursor.scalar(type, `"${key}"`));
  }
  return { values, vocabTokens };
}

function readGgufText(cursor: GgufCursor, key: string): string | null {
  const bytes = cursor.length(`the length of "${key}"`);
  if (bytes <= GGUF_LIMITS.textBytes) return cursor.text(bytes, `"${key}"`);
  cursor.skip(bytes);
  return null;
}

/** Reads an array's length, and its items where they matter for memory; else steps over them. */
function readGgufArray(
  cursor: GgufCursor,
  key: string,
): { length: number; items: readonly number[] | null } {
  const type = cursor.u32(`the element type of "${key}"`);
  const size = type === GGUF_STRING ? 8 : GGUF_SCALARS[type]?.[0];
  if (size === undefined) {
    const found = type === GGUF_ARRAY ? "an array of arrays" : `an array of type ${type}`;
    throw cursor.refuse(`"${key}" is ${found}`, cursor.offset - 4);
  }
  const length = cursor.length(`the length of "${key}"`, size);
  if (type === GGUF_STRING) {
    for (let index = 0; index < length; index++) {
      cursor.skip(cursor.length(`a text's length in "${key}"`));
    }
    return { length, items: null };
  }
  const isKept = PER_LAYER_KEYS.includes(key.slice(key.indexOf(".") + 1));
  if (isKept && length <= GGUF_LIMITS.layers) {
    return { length, items: Array.from({ length }, () => cursor.scalar(type, `"${key}"`)) };
  }
  cursor.skip(length * size);
  return { length, items: null };
}

function readAlignment(cursor: GgufCursor, values: ReadonlyMap<string, HeaderValue>): number {
  const alignment = values.has("general.alignment") ? values.get("general.alignment") : 32;
  const isPowerOfTwo = typeof alignment === "number" && Number.isInteger(Math.log2(alignment));
  if (isPowerOfTwo && alignment >= 1 && alignment <= MIB) return alignment;
  throw cursor.refuse(`general.alignment of ${JSON.stringify(alignment)}`);
}

/** What all tensors of a file add up to. */
interface TensorTotals {
  bytes: number;
  surplusBytes: number;
  /** Highest N of the names `blk.N.…`, or -1. */
  highestBlock: number;
  /** Rows of the token embedding, or null. */
  vocabTokens: number | null;
}

/** Reads the tensor list; as in ggml, each must start where the one before it ended, padded. */
function readGgufTensors(cursor: GgufCursor, count: number, alignment: number): TensorTotals {
  const totals: TensorTotals = { bytes: 0, surplusBytes: 0, highestBlock: -1, vocabTokens: null };
  const seen = new Set<string>();
  let [dataBytes, lastName] = [0, ""];
  for (let index = 0; index < count; index++) {
    const { name, sizes, bytes, offset } = readGgufTensor(cursor, seen);
    const expected = padTo(dataBytes, alignment);
    if (offset !== expected) {
      const found = `tensor "${name}" with data at ${offset}, not ${expected},`;
      throw cursor.refuse(found, cursor.offset - 8);
    }
    [dataBytes, lastName] = [offset + bytes, name];
    totals.bytes += bytes;
    const block = /^blk\.(\d+)\./.exec(name)?.[1];
    totals.highestBlock = Math.max(totals.highestBlock, Number(block ?? -1));
    if (name === "token_embd.weight") totals.vocabTokens = sizes[1] ?? null;
  }
  const end = count === 0 ? cursor.offset : padTo(cursor.offset, alignment) + dataBytes;
  const size = cursor.source.sizeBytes;
  if (end > size) {
    const found = `data up to ${end} (tensor "${lastName}"), past the end of the file at ${size},`;
    throw cursor.refuse(`${found} named`);
  }
  if (size - end >= alignment) totals.surplusBytes = size - end;
  return totals;
}

function readGgufTensor(
  cursor: GgufCursor,
  seen: Set<string>,
): { name: string; sizes: number[]; bytes: number; offset: number } {
  const name = cursor.newName("a tensor's name", GGUF_LIMITS.tensorNameBytes - 1, seen);
  const dimensions = cursor.u32(`the dimensions of "${name}"`);
  if (dimensions > GGUF_LIMITS.dimensions) {
    throw cursor.refuse(`tensor "${name}" with ${dimensions} dimensions`, cursor.offset - 4);
  }
  const sizes = Array.from({ length: dimensions }, () => {
    const size = cursor.u64(`a dimension of "${name}"`);
    if (size > 0) return size;
    throw cursor.refuse(`tensor "${name}" with a dimension of 0`, cursor.offset - 8);
  });
  const type = cursor.u32(`the type of "${name}"`);
  const format = TENSOR_FORMATS.get(type);
  if (format === undefined) {
    throw cursor.refuse(`tensor "${name}" of type ${type}`, cursor.offset - 4);
  }
  const [, typeName, blockElements, blockBytes] = format;
  if ((sizes[0] ?? 1) % blockElements !== 0) {
    throw cursor.refuse(
      `tensor "${name}" with rows of ${sizes[0]}, no multiple of the block of ${typeName},`,
    );
  }
  const bytes = sizes.reduce((product, size) => product * size, 1) / blockElements * blockBytes;
  if (bytes > cursor.source.sizeBytes) {
    throw cursor.refuse(`tensor "${name}" of ${bytes} bytes, more than the file holds,`);
  }
  return { name, sizes, bytes, offset: cursor.u64(`the offset of "${name}"`) };
}

/**
 * Names all files of a sharded model.
 *
 * @param path Path of any of them, or of a file that stands alone.
 * @returns All paths in order; only `path` itself when its name is no shard's.
 *
 * @example
 * ```ts
 * import { assertEquals } from "@std/assert";
 * assertEquals(listShards("m-00002-of-00002.gguf"), ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]);
 * ```
 */
export function listShards(path: string): string[] {
  const match = /^(.*)-(\d{5})-of-(\d{5})\.gguf$/s.exec(path);
  const count = Number(match?.[3] ?? 0);
  if (match === null || count < 1) return [path];
  const number = (value: number) => `${value}`.padStart(5, "0");
  return Array.from(
    { length: count },
    (_, index) => `${match[1]}-${number(index + 1)}-of-${number(count)}.gguf`,
  );
}

/**
 * Adds the shards of a model up.
 *
 * Source: llama.cpp's gguf-split and loader, 2026-09: every shard says which of how many it is
 * (`split.no` counts from 0), the first one holds the metadata.
 *
 * @throws {RefusedError} When a shard says that it is another one than its name and place say.
 */
export function joinShards(
  shards: readonly GgufFile[],
  paths: readonly string[],
): Pick<LoadedModel, "files" | "header" | "weightsBytes" | "warnings"> {
  for (const [index, { values }] of shards.entries()) {
    const [number, count] = [values.get("split.no"), values.get("split.count")];
    const isAlone = shards.length === 1 && !count;
    if (isAlone || (number === index && count === shards.length)) continue;
    throw refusal(
      `Cannot read GGUF file "${paths[index]}": by its name shard ${index} (from 0) of ` +
        `${shards.length}, in it split.no is ${number ?? "missing"}, split.count ${count ?? "too"}`,
      "name a file of the model as it was published: …-00001-of-NNNNN.gguf",
    );
  }
  const first = shards[0]!;
  const tensorCount = sumOf(shards, (shard) => shard.tensorCount);
  const expected = first.values.get("split.tensors.count") ?? tensorCount;
  if (expected !== tensorCount) {
    const found = `${tensorCount} of ${expected} tensors`;
    throw refusal(`Cannot read GGUF file "${paths[0]}": ${found}`, DAMAGED_HINT);
  }
  const vocabulary = shards.find((shard) => shard.vocabTokens !== null);
  return {
    files: shards.length,
    header: { values: first.values, vocabTokens: vocabulary?.vocabTokens ?? null },
    weightsBytes: sumOf(shards, (shard) => shard.weightsBytes),
    warnings: shards.filter((shard) => shard.surplusBytes > 0).map(({ surplusBytes }) =>
      `${surplusBytes} bytes follow the last tensor's data: the file may be damaged, ` +
      "they count as weights"
    ),
  };
}

function parseObject(text: string, path: string): Record<string, unknown> {
  const root = parseJsonText(text, path);
  if (isRecord(root)) return root;
  throw refusal(`Cannot use "${path}": found ${describeValue(root)}, wanted an object`);
}

/**
 * Turns a Hugging Face config.json into a header with GGUF's key names, so that one model of memory
 * serves both.
 *
 * Source: config classes of transformers 4.57 and the conversion of llama.cpp, 2026-09.
 *
 * @param path The file's path, for messages.
 * @returns The header; numbers that the file does not state are left out.
 * @throws {RefusedError|SyntaxError} When it is no JSON object or a number in it is none.
 */
export function parseHfConfig(text: string, path: string): ModelHeader {
  const root = parseObject(text, path);
  const nested = root["text_config"];
  const config = isRecord(nested) ? { ...root, ...nested } : root;
  const modelType = `${config["model_type"] ?? "unknown"}`;
  const architecture = HF_ARCHITECTURES.get(modelType) ?? modelType;
  const values = new Map<string, HeaderValue>([["general.architecture", architecture]]);
  const entries = { ...readHfSizes(config), ...readHfLayers(config), ...readHfMla(config) };
  for (const [key, value] of Object.entries(entries)) {
    if (value !== undefined) values.set(`${architecture}.${key}`, value);
  }
  return { values, vocabTokens: null };
}

type HfEntries = Record<string, number | readonly number[] | undefined>;

/** The first of the names that holds anything, which must be a number. */
function findNumber(config: Record<string, unknown>, ...names: string[]): number | undefined {
  for (const name of names) {
    const value = config[name] ?? undefined;
    if (typeof value === "number") return value;
    if (value !== undefined) throw refusal(`Cannot size model: ${name} is ${describeValue(value)}`);
  }
  return undefined;
}

function readHfSizes(config: Record<string, unknown>): HfEntries {
  const find = (...names: string[]) => findNumber(config, ...names);
  const product = (a: number | undefined, b: number | undefined) =>
    a === undefined || b === undefined ? undefined : a * b;
  return {
    "block_count": find("num_hidden_layers"),
    "context_length": find("max_position_embeddings"),
    "embedding_length": find("hidden_size"),
    "vocab_size": find("vocab_size"),
    "attention.head_count": find("num_attention_heads"),
    "attention.head_count_kv": find("num_key_value_heads", "num_attention_heads"),
    "attention.key_length": find("head_dim", "attention_head_dim"),
    "attention.value_length": find("v_head_dim", "head_dim", "attention_head_dim"),
    "attention.sliding_window": config["use_sliding_window"] === false ? 0 : find("sliding_window"),
    "attention.sliding_window_pattern": find("sliding_window_pattern"),
    "attention.shared_kv_layers": find("num_kv_shared_layers"),
    "attention.indexer.top_k": find("index_topk"),
    "full_attention_interval": find("full_attention_interval"),
    "shortconv.l_cache": find("conv_L_cache"),
    "ssm.conv_kernel": find("mamba_d_conv", "linear_conv_kernel_dim", "conv_kernel"),
    "ssm.state_size": find("mamba_d_state", "linear_key_head_dim", "ssm_state_size", "state_size"),
    "ssm.group_count": find("mamba_n_groups", "linear_num_key_heads", "n_groups"),
    "ssm.inner_size": find("mamba_d_ssm") ??
      product(find("linear_num_value_heads"), find("linear_value_head_dim")) ??
      product(find("mamba_num_heads"), find("mamba_head_dim")) ??
      product(find("mamba_expand", "expand"), find("hidden_size")),
  };
}

/** Which layers slide or keep a recurrent state, from the several ways of saying it. */
function readHfLayers(config: Record<string, unknown>): HfEntries {
  const kinds = listHfLayerKinds(config);
  const kvHeads = findNumber(config, "num_key_value_heads", "num_attention_heads") ?? 0;
  const slides = (kind: string) => kind === "sliding_attention" || kind === "chunked_attention";
  const attends = (kind: string) => kind.includes("attention") && kind !== "linear_attention";
  const entries: HfEntries = {};
  if (kinds.some(slides)) {
    entries["attention.sliding_window_pattern"] = kinds.map((kind) => Number(slides(kind)));
  }
  if (!kinds.every(attends)) {
    entries["attention.head_count_kv"] = kinds.map((kind) => attends(kind) ? kvHeads : 0);
    entries["feed_forward_length"] = kinds.map((kind) => Number(kind === "mlp"));
  }
  return entries;
}

/** One word a layer, or none where config.json does not tell layers apart. */
function listHfLayerKinds(config: Record<string, unknown>): string[] {
  const listed = config["layer_types"] ?? config["layers_block_type"];
  if (Array.isArray(listed)) return listed.map((kind) => kind === "full" ? "attention" : `${kind}`);
  // Nemotron-H: a letter a layer.
  const letters = config["hybrid_override_pattern"];
  if (typeof letters === "string") {
    const words: Record<string, string> = { "*": "attention", "M": "mamba" };
    return Array.from(letters, (letter) => words[letter] ?? "mlp");
  }
  const period = findNumber(config, "attn_layer_period");
  const offset = findNumber(config, "attn_layer_offset");
  const layers = findNumber(config, "num_hidden_layers") ?? 0;
  if (!period || offset === undefined) return [];
  const length = Math.min(Math.max(0, layers), GGUF_LIMITS.layers);
  return Array.from({ length }, (_, index) => index % period === offset ? "attention" : "mamba");
}

/** DeepSeek's latent attention: one vector a layer, the latent and the rotated part. */
function readHfMla(config: Record<string, unknown>): HfEntries {
  const latent = findNumber(config, "kv_lora_rank");
  const rope = findNumber(config, "qk_rope_head_dim");
  if (latent === undefined || rope === undefined) return {};
  return {
    "attention.head_count_kv": 1,
    "attention.key_length": latent + rope,
    "attention.value_length": latent,
    "attention.key_length_mla": (findNumber(config, "qk_nope_head_dim") ?? 0) + rope,
    "attention.value_length_mla": findNumber(config, "v_head_dim") ?? 0,
  };
}

/**
 * Adds up the tensors of a safetensors file from its header.
 *
 * Source of the format: safetensors' README, 0.6, checked 2026-09.
 *
 * @param path The file's path, for messages.
 * @throws {RefusedError|SyntaxError} When the header is damaged, or when the tensors leave a hole,
 * overlap or do not end with the file.
 */
export function readSafetensorsBytes(source: ByteSource, path: string): number {
  const refuse = (found: string) =>
    refusal(`Cannot read safetensors file "${path}": ${found}`, DAMAGED_HINT);
  const head = new Uint8Array(8);
  if (source.readAt(0, head) < 8) throw refuse("the file ends inside the header's length");
  const headerBytes = Number(new DataView(head.buffer).getBigUint64(0, true));
  if (headerBytes > Math.min(JSON_LIMIT_BYTES, source.sizeBytes - 8)) {
    throw refuse(`a header of ${headerBytes} bytes in a file of ${source.sizeBytes}`);
  }
  const { __metadata__: _, ...tensors } = parseObject(readTextAt(source, 8, headerBytes), path);
  const spans = Object.entries(tensors).map(([name, tensor]): [number, number] => {
    const offsets = isRecord(tensor) ? tensor["data_offsets"] : undefined;
    const [from, to] = Array.isArray(offsets) ? offsets : [];
    if (Number.isSafeInteger(from) && Number.isSafeInteger(to)) return [from, to];
    throw refuse(`tensor "${name}" has no data_offsets`);
  });
  let end = 0;
  for (const [from, to] of spans.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    if (from !== end || to < from) throw refuse(`a tensor from ${from} to ${to}, not from ${end}`);
    end = to;
  }
  if (8 + headerBytes + end === source.sizeBytes) return end;
  throw refuse(`data up to ${8 + headerBytes + end} in a file of ${source.sizeBytes} bytes`);
}

function readTextAt(source: ByteSource, offset: number, bytes: number): string {
  const buffer = new Uint8Array(bytes);
  return new TextDecoder().decode(buffer.subarray(0, source.readAt(offset, buffer)));
}

/**
 * Finds the manifest that an ollama model's name stands for.
 *
 * Source: ollama's types/model/name.go, 2026-09: `[[host/]namespace/]model[:tag]`.
 *
 * @param name The name as given to `ollama run`.
 * @returns The manifest's path below the models folder, or null when this can be no such name.
 *
 * @example
 * ```ts
 * import { assertEquals } from "@std/assert";
 * assertEquals(parseOllamaName("qwen3:8b"), "manifests/registry.ollama.ai/library/qwen3/8b");
 * ```
 */
export function parseOllamaName(name: string): string | null {
  const [, path = "", tag = "latest"] = /^(.*?)(?::([^/:]*))?$/s.exec(name) ?? [];
  const parts = path.split("/");
  const defaults = ["registry.ollama.ai", "library"];
  const full = [...defaults.slice(0, Math.max(0, 3 - parts.length)), ...parts, tag];
  // No part may climb out of the folder or hide a separator; a host may have a port.
  const isSafe = full.length === 4 &&
    full.every((part, index) => (index === 0 ? /^\w[\w.-]*(:\d+)?$/ : /^\w[\w.-]*$/).test(part));
  return isSafe ? ["manifests", ...full].join("/") : null;
}

/** Files that an ollama manifest names, as paths below the models folder. */
export interface OllamaManifest {
  model: string;
  /** Projectors and adapters, which are loaded beside it. */
  extras: string[];
}

/**
 * Reads an ollama manifest.
 *
 * Source: ollama's manifests on disk, 2026-09.
 *
 * @param path The file's path, for messages.
 * @throws {RefusedError|SyntaxError} When it does not name exactly one model, or a file oddly.
 */
export function parseOllamaManifest(text: string, path: string): OllamaManifest {
  const layers = parseObject(text, path)["layers"];
  const listBlobs = (kind: string): string[] =>
    (Array.isArray(layers) ? layers : []).filter((layer: unknown) =>
      isRecord(layer) && layer["mediaType"] === `application/vnd.ollama.image.${kind}`
    ).map(({ digest }: Record<string, unknown>) => {
      if (/^sha256:[0-9a-f]{64}$/.test(`${digest}`)) return `blobs/${digest}`.replace(":", "-");
      throw refusal(`Cannot read ollama manifest "${path}": digest ${describeValue(digest)}`);
    });
  const [model, ...more] = listBlobs("model");
  if (model !== undefined && more.length === 0) {
    return { model, extras: [...listBlobs("projector"), ...listBlobs("adapter")] };
  }
  const count = model === undefined ? 0 : 1 + more.length;
  throw refusal(`Cannot read ollama manifest "${path}": ${count} model files`);
}

/** Splits what LINUX_FACTS_SCRIPT printed into files: path → text without blanks at its ends. */
export function parseLinuxFacts(text: string): Map<string, string> {
  const files = new Map<string, string>();
  for (const part of text.split(/^==> /m).slice(1)) {
    const [path = ""] = part.split("\n", 1);
    files.set(path, part.slice(path.length).trim());
  }
  return files;
}

/** A whole number, by default of bytes; null for anything else. */
function parseByteCount(text: unknown, unitBytes = 1): number | null {
  return typeof text === "string" && /^\d{1,19}$/.test(text) ? Number(text) * unitBytes : null;
}

function subtract(total: number | null, used: number | null): number | null {
  return total === null || used === null ? null : total - used;
}

/** Total and free memory; free memory that is no part of the total is unknown, for the reason `why`. */
function readingOf(total: number | null, free: number | null, why: string): MemoryReading {
  const isKnown = total !== null && free !== null && free >= 0 && free <= total;
  return {
    total_bytes: total,
    free_bytes: isKnown ? free : null,
    unknown_reason: isKnown ? null : why,
    note: null,
  };
}

/**
 * The machine's memory on Linux: what the kernel calls available, cut to what the control groups
 * above this process leave (v1 and v2; their page cache that can be dropped does not count as used).
 *
 * Source: kernel documentation of meminfo, cgroup-v1/memory and cgroup-v2, 6.x.
 *
 * @param files Paths and texts from parseLinuxFacts().
 */
export function parseHostMemory(files: ReadonlyMap<string, string>): MemoryReading {
  const meminfo = files.get("/proc/meminfo") ?? "";
  const field = (name: string) =>
    parseByteCount(new RegExp(`^${name}:\\s+(\\d+) kB$`, "m").exec(meminfo)?.[1], KIB);
  const total = field("MemTotal");
  const host = readingOf(total, field("MemAvailable"), "/proc/meminfo tells no MemAvailable");
  if (total === null || host.free_bytes === null) return host;
  let [free, limit, note] = [host.free_bytes, total, host.note];
  for (const group of listCgroups(files)) {
    if (group.roomBytes === null) {
      return readingOf(total, null, `the use of ${group.path} is unreadable`);
    }
    if (group.roomBytes >= free) continue;
    [free, limit] = [group.roomBytes, Math.min(total, group.limitBytes)];
    note = `limited by control group ${group.path}`;
  }
  return { ...readingOf(limit, free, ""), note };
}

/** Control groups with a limit, and what they leave: limit − (use − droppable cache), at least 0. */
function listCgroups(
  files: ReadonlyMap<string, string>,
): { path: string; limitBytes: number; roomBytes: number | null }[] {
  return CGROUP_FILES.flatMap(([limit, used, cache]) =>
    [...files.keys()].filter((path) => path.endsWith(`/${limit}`)).flatMap((file) => {
      const path = file.slice(0, -limit.length - 1);
      const limitBytes = parseByteCount(files.get(file));
      // "max" in version 2, an enormous number in version 1: no limit.
      if (limitBytes === null || limitBytes >= CGROUP_NO_LIMIT_BYTES) return [];
      const usedBytes = parseByteCount(files.get(`${path}/${used}`));
      const stat = files.get(`${path}/memory.stat`) ?? "";
      const cached = Number(new RegExp(`^${cache} (\\d+)$`, "m").exec(stat)?.[1] ?? 0);
      const roomBytes = usedBytes === null ? null : limitBytes - Math.max(0, usedBytes - cached);
      return [{ path, limitBytes, roomBytes: roomBytes && Math.max(0, roomBytes) }];
    })
  );
}

function newProbe(
  probe: string,
  state: ProbeReport["state"],
  reason: string | null,
  devices: DeviceReport[] = [],
): ProbeReport {
  return { probe, state, reason, devices };
}

/** Why a program's output is of no use, in its own words; null when it exited well. */
function describeFailure(output: ProbeOutput): string | null {
  if ("problem" in output) return output.problem;
  if (output.code === 0) return null;
  const lines = listLines(`${output.stdout}\n${output.stderr}`);
  return `exited with ${output.code}: ${lines[0] ?? "no words"}`;
}

function listLines(text: string): string[] {
  return text.split("\n").map((line) => line.trim()).filter((line) => line !== "");
}

/** A driver's tool that told nothing: where it is not installed, its cards are absent. */
function reportSilence(probe: string, program: string, output: ProbeOutput): ProbeReport {
  const failure = describeFailure(output);
  const state = failure === NOT_INSTALLED ? "absent" : "unknown";
  return newProbe(probe, state, `${program} ${failure}`);
}

/** Which cards a variable leaves visible, as CUDA and HIP read it; null when it is not set. */
export type VisibleDevices = { variable: string; list: string } | null;

/** What a variable may call a card: its place in the list, or the start of its uuid. */
interface NamedCard {
  index: string;
  /** Null where the source does not tell. */
  uuid: string | null;
}

/**
 * Reports the cards that a variable lists; like CUDA, an entry that means no card ends the list.
 * Where an entry cannot be understood here, what is visible is unknown.
 */
function reportVisible<T extends NamedCard>(
  { probe, cards, visible }: { probe: string; cards: readonly T[]; visible: VisibleDevices },
  describe: (card: T) => DeviceReport,
): ProbeReport {
  if (visible === null) return newProbe(probe, "found", null, cards.map(describe));
  const shown: T[] = [];
  for (const entry of visible.list.split(",").map((part) => part.trim())) {
    const isBlind = entry.startsWith("MIG-") ||
      (entry.startsWith("GPU-") && cards.some((card) => card.uuid === null));
    if (isBlind) {
      const reason = `${visible.variable} lists ${entry}, whose memory is not known`;
      return newProbe(probe, "unknown", reason);
    }
    const card = cards.find(({ index, uuid }) =>
      index === entry || (entry.length > 3 && uuid?.startsWith(entry))
    );
    if (card === undefined || shown.includes(card)) break;
    shown.push(card);
  }
  if (shown.length === 0) return newProbe(probe, "absent", `${visible.variable} hides all`);
  return newProbe(probe, "found", null, shown.map(describe));
}

/**
 * Reads NVIDIA cards from nvidia-smi.
 *
 * Source: nvidia-smi's manual and outputs in public reports, drivers 470 to 590.
 *
 * @param output What nvidia-smi printed for the query of this file, in MiB.
 * @param visible CUDA_VISIBLE_DEVICES.
 * @param host The machine's memory, for GPUs that share it.
 * @returns The cards; a card with a cell that is no number is unknown, not empty.
 */
export function parseNvidiaSmi(
  output: ProbeOutput,
  visible: VisibleDevices,
  host: MemoryReading,
): ProbeReport {
  const [stdout, stderr] = "problem" in output ? ["", ""] : [output.stdout, output.stderr];
  const lines = listLines(stdout);
  const rows = lines.flatMap((line) => parseNvidiaRow(line) ?? []);
  const cards = rows.filter(({ index }, at) => rows.findIndex((row) => row.index === index) === at);
  if (cards.length === 0) {
    if (/^No devices were found/m.test(`${stdout}\n${stderr}`)) {
      return newProbe("nvidia", "absent", "nvidia-smi: No devices were found");
    }
    if (describeFailure(output) !== null) return reportSilence("nvidia", "nvidia-smi", output);
    if (lines.length === 0) return newProbe("nvidia", "absent", "nvidia-smi lists no card");
    return newProbe("nvidia", "unknown", `nvidia-smi printed a line that is no card: ${lines[0]}`);
  }
  const report = reportVisible(
    { probe: "nvidia", cards, visible },
    (card) => describeNvidiaCard(card, host),
  );
  const isMixed = new Set(cards.map((card) => card.name)).size > 1;
  if (isMixed && /^\s*\d/.test(visible?.list ?? "")) {
    for (const device of report.devices) device.note = CUDA_ORDER_NOTE;
  }
  // A card that has failed is told of in words between the others' rows.
  const odd = lines.find((line) => parseNvidiaRow(line) === null);
  if (odd !== undefined && report.state === "found") {
    report.devices.push(newUnknownDevice("nvidia", `nvidia-smi says: ${odd}`));
  }
  return report;
}

interface NvidiaCard extends NamedCard {
  uuid: string;
  name: string;
  total: string;
  free: string;
}

/** A row's cells from both ends, since a name may hold a comma; null when there are too few. */
function parseNvidiaRow(line: string): NvidiaCard | null {
  const cells = line.split(",").map((cell) => cell.trim());
  const [index = "", uuid = ""] = cells;
  const [total = "", free = ""] = cells.slice(-2);
  if (cells.length < 5 || !/^\d+$/.test(index) || uuid === "") return null;
  return { index, uuid, name: cells.slice(2, -2).join(", "), total, free };
}

function describeNvidiaCard(card: NvidiaCard, host: MemoryReading): DeviceReport {
  const identity = { id: card.uuid, name: card.name };
  if (NVIDIA_UNIFIED.test(card.name)) {
    const note = `shares the machine's memory${host.note === null ? "" : `, ${host.note}`}`;
    return { ...identity, kind: "integrated", ...host, note };
  }
  const why = `nvidia-smi says memory.total ${card.total}, memory.free ${card.free}`;
  const [total, free] = [parseByteCount(card.total, MIB), parseByteCount(card.free, MIB)];
  return { ...identity, kind: "discrete", ...readingOf(total, free, why) };
}

/** One graphics card below /sys/class/drm. */
interface DrmCard extends NamedCard {
  /** `card0`. */
  id: string;
  name: string;
  /** Bytes that a file tells; null where it is missing. */
  bytes(file: string): number | null;
  files: string[];
}

function listDrmCards(files: ReadonlyMap<string, string>, id: string, vendor: string): DrmCard[] {
  const folders = [...files].filter(([, text]) => text === id).flatMap(([path]) =>
    /^(\/sys\/class\/drm\/card\d+)\/device\/vendor$/.exec(path)?.[1] ?? []
  );
  return folders.map((folder, index) => {
    const pciId = /^PCI_ID=(\S+)$/m.exec(files.get(`${folder}/device/uevent`) ?? "")?.[1];
    const name = `${vendor} ${basename(folder)}${pciId === undefined ? "" : ` (${pciId})`}`;
    return {
      index: `${index}`,
      uuid: null,
      id: basename(folder),
      name,
      bytes: (file) => parseByteCount(files.get(`${folder}/${file}`)),
      files: [...files.keys()].filter((path) => path.startsWith(`${folder}/`)),
    };
  });
}

/**
 * Reads AMD cards from sysfs.
 *
 * Source: the kernel's amdgpu documentation (mem_info_*), 6.x; the rule for APUs after llama.cpp
 * and ollama reports of machines with a small carve-out, 2026.
 *
 * @param files Paths and texts from parseLinuxFacts().
 * @param visible HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES.
 * @param host The machine's memory, for APUs.
 */
export function parseAmdSysfs(
  files: ReadonlyMap<string, string>,
  visible: VisibleDevices,
  host: MemoryReading,
): ProbeReport {
  const cards = listDrmCards(files, "0x1002", "AMD");
  if (cards.length === 0) return newProbe("amd", "absent", "no AMD card in /sys/class/drm");
  return reportVisible({ probe: "amd", cards, visible }, (card) => describeAmdCard(card, host));
}

function describeAmdCard(card: DrmCard, host: MemoryReading): DeviceReport {
  const identity = { id: card.id, name: card.name };
  const vram = card.bytes("device/mem_info_vram_total");
  const used = card.bytes("device/mem_info_vram_used");
  const gtt = card.bytes("device/mem_info_gtt_total") ?? 0;
  const gttUsed = card.bytes("device/mem_info_gtt_used") ?? 0;
  const why = `the driver says mem_info_vram_total ${vram}, mem_info_vram_used ${used}`;
  const own = readingOf(vram, subtract(vram, used), why);
  const isApu = vram !== null && vram <= APU_MAX_VRAM_BYTES && gtt >= APU_MIN_GTT_BYTES &&
    gtt >= APU_MIN_GTT_RATIO * vram;
  if (!isApu || own.free_bytes === null) return { ...identity, kind: "discrete", ...own };
  const reading = host.free_bytes === null ? host : readingOf(
    vram + gtt,
    own.free_bytes + Math.min(Math.max(0, gtt - gttUsed), host.free_bytes),
    "",
  );
  const note = "shares the machine's memory beyond its own carve-out";
  return { ...identity, kind: "integrated", ...reading, note };
}

/**
 * Reads AMD cards from `rocm-smi --showmeminfo vram --json`.
 *
 * Source: rocm-smi 5 to 7; its numbers are texts, warnings may come before the JSON.
 *
 * @param visible HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES.
 */
export function parseRocmSmi(output: ProbeOutput, visible: VisibleDevices): ProbeReport {
  if ("problem" in output || output.code !== 0) return reportSilence("amd", "rocm-smi", output);
  const line = listLines(output.stdout).find((text) => text.startsWith("{"));
  let root: unknown = null;
  try {
    root = JSON.parse(line ?? "");
  } catch {
    // No JSON: told below as what it is, no card.
  }
  const cards = Object.entries(isRecord(root) ? root : {})
    .filter(([id]) => /^card\d+$/.test(id))
    .map(([id, fields], index) => ({ index: `${index}`, uuid: null, id, fields }));
  if (cards.length === 0) {
    const words = listLines(output.stdout)[0] ?? "nothing";
    return newProbe("amd", "unknown", `rocm-smi lists no card but prints ${words}`);
  }
  return reportVisible({ probe: "amd", cards, visible }, ({ id, fields }) => {
    const read = (name: string) => parseByteCount(isRecord(fields) ? fields[name] : null);
    const total = read("VRAM Total Memory (B)");
    const used = read("VRAM Total Used Memory (B)");
    const reading = readingOf(
      total,
      subtract(total, used),
      `rocm-smi says total ${total}, used ${used}`,
    );
    return { id, name: `AMD ${id}`, kind: "discrete", ...reading };
  });
}

/**
 * Reads Intel cards with memory of their own from sysfs. i915 may tell what is free, xe only tells
 * how much there is: then free memory is unknown. Integrated GPUs are left out.
 *
 * Source: i915's and xe's sysfs files (lmem_*_bytes, tile*\/physical_vram_size_bytes), kernel 6.x.
 *
 * @param files Paths and texts from parseLinuxFacts().
 */
export function parseIntelSysfs(files: ReadonlyMap<string, string>): ProbeReport {
  const devices = listDrmCards(files, "0x8086", "Intel").flatMap((card): DeviceReport[] => {
    const read = (name: string) => card.bytes(name) ?? card.bytes(`device/${name}`);
    const tiles = card.files.filter((path) => path.endsWith("/physical_vram_size_bytes"));
    const tileBytes = sumOf(tiles, (path) => parseByteCount(files.get(path)) ?? 0);
    const total = read("lmem_total_bytes") ?? tileBytes;
    if (total === 0) return [];
    const why = "the driver does not tell how much of it is free";
    const reading = readingOf(total, read("lmem_avail_bytes"), why);
    return [{ id: card.id, name: card.name, kind: "discrete", ...reading }];
  });
  if (devices.length > 0) return newProbe("intel", "found", null, devices);
  return newProbe("intel", "absent", "no Intel card with memory of its own in /sys/class/drm");
}

/**
 * Reads the memory that a Mac's GPU may use from `sysctl hw.memsize hw.optional.arm64
 * iogpu.wired_limit_mb`. A limit of 0, or none (macOS before 14 has no such setting), means the
 * system's own limit, which exists all the same and of which only an estimate is possible. sysctl
 * stops with exit code 1 at a name that it does not know.
 *
 * Source: llama.cpp and MLX discussions of recommendedMaxWorkingSetSize, 2025.
 *
 * @returns One integrated device; unknown on a Mac without an Apple GPU.
 */
export function parseAppleSysctl(output: ProbeOutput): ProbeReport {
  const printed = "problem" in output ? "" : output.stdout;
  const read = (name: string) =>
    parseByteCount(new RegExp(`^${name}: (\\d+)$`, "m").exec(printed)?.[1]);
  const memory = read("hw\\.memsize");
  if (!memory) {
    const words = describeFailure(output) ?? "printed no hw.memsize";
    return newProbe("apple", "unknown", `sysctl ${words}`);
  }
  if (read("hw\\.optional\\.arm64") !== 1) {
    return newProbe("apple", "unknown", "only a Mac with an Apple GPU can be measured");
  }
  const limit = (read("iogpu\\.wired_limit_mb") ?? 0) * MIB;
  const share = memory <= APPLE_SMALL_BYTES ? APPLE_SMALL_SHARE : APPLE_LARGE_SHARE;
  const usable = limit === 0 ? Math.floor(memory * share) : Math.min(limit, memory);
  const origin = limit === 0
    ? "an estimate of the system's own limit"
    : "the limit set in iogpu.wired_limit_mb";
  return newProbe("apple", "found", null, [{
    id: "apple",
    name: "Apple GPU",
    kind: "integrated",
    ...readingOf(usable, usable, ""),
    note: `${origin}; memory in use by others is not known`,
  }]);
}

/**
 * Reads cards from the Windows registry: `reg query … /s /v HardwareInformation.qwMemorySize`. It
 * tells how much memory there is, not how much is free. AdapterRAM, 32 bits wide, is never used.
 *
 * Source: Windows' display class key, 10 and 11.
 */
export function parseWindowsRegistry(output: ProbeOutput): ProbeReport {
  if ("problem" in output) return newProbe("windows", "unknown", `reg ${output.problem}`);
  const value =
    /^HKEY_.*\\(\S+)\s+HardwareInformation\.qwMemorySize\s+REG_QWORD\s+0x([0-9a-f]{1,13})\s*$/gim;
  const devices = [...output.stdout.matchAll(value)].flatMap(
    ([, id = "", hex = ""]): DeviceReport[] => {
      const total = parseInt(hex, 16);
      if (total === 0) return [];
      const reading = readingOf(total, null, "the registry does not tell how much of it is free");
      return [{ id, name: `display adapter ${id}`, kind: "discrete", ...reading }];
    },
  );
  // reg exits with 1 when it finds no such value.
  if (devices.length === 0) return newProbe("windows", "absent", "no qwMemorySize in the registry");
  return newProbe("windows", "found", null, devices);
}

/** Reads `FreePhysicalMemory TotalVisibleMemorySize` of Windows, both in KiB. */
export function parseWindowsMemory(output: ProbeOutput): MemoryReading {
  const failure = describeFailure(output);
  const printed = "problem" in output ? "" : output.stdout;
  const why = `powershell ${failure ?? `printed ${listLines(printed)[0] ?? "nothing"}`}`;
  if (failure !== null) return readingOf(null, null, why);
  const [free, total] = printed.trim().split(" ").map((word) => parseByteCount(word, KIB));
  return readingOf(total ?? null, free ?? null, why);
}

/**
 * Puts together what is known of a Windows machine.
 *
 * @param outputs What nvidia-smi, reg and powershell printed.
 * @param visible CUDA_VISIBLE_DEVICES.
 */
export function parseWindows(
  outputs: { smi: ProbeOutput; registry: ProbeOutput; memory: ProbeOutput },
  visible: VisibleDevices,
): ProbeReport[] {
  const host = parseWindowsMemory(outputs.memory);
  const nvidia = parseNvidiaSmi(outputs.smi, visible, host);
  // The registry lists NVIDIA's cards too, without telling what is free.
  const others = nvidia.state === "found" ? [] : [parseWindowsRegistry(outputs.registry)];
  return [nvidia, ...others, reportHost(host)];
}

/** The machine's own memory as a device. */
function reportHost(host: MemoryReading): ProbeReport {
  const state = host.free_bytes === null ? "unknown" : "found";
  const device = { id: "cpu", name: "the machine's memory", kind: "cpu" as const, ...host };
  return newProbe("cpu", state, host.unknown_reason, [device]);
}

/** Stands for what a failed probe could have found, so that it is not taken for absent. */
function newUnknownDevice(probe: string, reason: string): DeviceReport {
  const kind = probe === "apple" ? "integrated" : "discrete";
  return { id: probe, name: `${probe} device`, kind, ...readingOf(null, null, reason) };
}

function formatMib(bytes: number): string {
  return `${(bytes / MIB).toFixed(2)} MiB`;
}

/** Takes out what could steer a terminal: names and words come from files and other programs. */
function printable(text: string): string {
  return text.replace(/\p{Cc}/gu, "?");
}

/** Breaks text at blanks so that lines are no longer than `width`, unless a word is. */
function wrapText(text: string, width: number): string[] {
  const lines: string[] = [];
  for (const word of printable(text).split(" ")) {
    const longer = `${lines.at(-1)} ${word}`;
    if (lines.length > 0 && longer.length <= width) lines.splice(-1, 1, longer);
    else lines.push(word);
  }
  return lines;
}

/** A row of a table: what, words that may take several lines, how much (flush right). */
type TableRow = readonly [label: string, words: string, amount?: string];

/** Lays out a titled table in lines of `columns`; nothing when it has no rows. */
function renderTable(title: string, rows: readonly TableRow[], columns: number): string[] {
  if (rows.length === 0) return [];
  const labelWidth = Math.max(...rows.map(([label]) => label.length));
  const amountWidth = Math.max(...rows.map(([, , amount = ""]) => amount.length));
  const lines = rows.flatMap(([label, words, amount = ""]) => {
    const cells = amountWidth > 0 ? [amount.padStart(amountWidth)] : [];
    const lead = ["", printable(label).padEnd(labelWidth), ...cells, ""].join("  ");
    const [head, ...tail] = wrapText(words, Math.max(20, columns - lead.length));
    return [lead + head, ...tail.map((line) => " ".repeat(lead.length) + line)];
  });
  return ["", title, ...lines.map((line) => line.trimEnd())];
}

/**
 * The derivation as tables for people.
 *
 * @param columns How many characters a line may hold.
 * @returns Several lines, without a final newline.
 */
export function renderExplanation({ report, need, raises }: Detection, columns: number): string {
  const { budget, warnings, memory_at_context: asked } = report;
  const needs = [need, asked?.context_tokens === need?.context_tokens ? null : asked];
  const sections: [string, TableRow[]][] = [
    ["Model", listModelRows(report)],
    ["Devices", listDeviceRows(report)],
    ...needs.flatMap((each): [string, TableRow[]][] =>
      each === null ? [] : [[`Need of ${each.context_tokens} tokens`, listNeedRows(each, report)]]
    ),
    [`Budget: ${budget?.pool}`, budget === null ? [] : listBudgetRows(budget)],
    ["Answer", listAnswerRows(report)],
    ["What would raise it", raises.map((line) => ["-", line])],
    ["Warnings", warnings.map((line) => ["-", line])],
  ];
  return sections.flatMap(([title, rows]) => renderTable(title, rows, columns)).slice(1).join("\n");
}

function listModelRows({ model, assumptions }: DetectReport): TableRow[] {
  const { name = "none", path } = model ?? {};
  const nameRow: TableRow = ["name", `${name}`];
  if (model === null || assumptions === null) return [nameRow];
  const kinds = [
    [model.full_context_layers, "keep the whole context"],
    [model.sliding_layers, `keep a window of ${model.window_tokens} tokens`],
    [model.recurrent_layers, "keep a recurrent state"],
  ].filter(([count]) => count !== 0).map((words) => words.join(" "));
  const { kv_type_k: k, kv_type_v: v, slots, ubatch_tokens: ubatch } = assumptions;
  return [
    ...path === name ? [] : [nameRow],
    ["path", `${path}${model.files === 1 ? "" : ` (${model.files} files)`}`],
    ["architecture", `${model.architecture}${model.is_upper_bound ? ", an upper bound" : ""}`],
    ["layers", `${model.layers}: ${kinds.join(", ")}`],
    ["native context", `${model.native_context_tokens ?? "unknown"} tokens`],
    ["run with", `K in ${k}, V in ${v}, slots ${slots}, ubatch ${ubatch}`],
  ];
}

function listDeviceRows({ devices, probes }: DetectReport): TableRow[] {
  const rows = devices.map(({ name, kind, note, ...device }): TableRow => {
    if (device.free_bytes === null) return [name, `${device.unknown_reason}`, "unknown"];
    const words = [`free of ${formatMib(device.total_bytes ?? 0)}`, kind, note ?? []].flat();
    return [name, words.join(", "), formatMib(device.free_bytes)];
  });
  const absent = probes.filter((probe) => probe.state === "absent");
  return [...rows, ...absent.map(({ probe, reason }): TableRow => [probe, `${reason}`, "absent"])];
}

function listNeedRows(need: MemoryAtContext, { memory }: DetectReport): TableRow[] {
  const { projector_bytes, kv_bytes_per_token, compute_bytes_per_token } = memory ?? {};
  const rows: [string, string, number][] = [
    [
      "weights",
      projector_bytes ? `of it projector ${formatMib(projector_bytes)}` : "",
      need.weights_bytes,
    ],
    ["KV cache", `${kv_bytes_per_token} bytes a token`, need.kv_bytes],
    ["KV cache of windows", "", need.kv_swa_bytes],
    ["recurrent state", "", need.recurrent_bytes],
    ["compute buffer", `of it ${compute_bytes_per_token} bytes a token`, need.compute_bytes],
    ["together", "", need.total_bytes],
  ];
  return rows.filter((row) => row[2] > 0).map((
    [label, words, bytes],
  ) => [label, words, formatMib(bytes)]);
}

function listBudgetRows({ terms, total_bytes }: BudgetReport): TableRow[] {
  const rows = terms.map((term): TableRow => {
    const words = `${formatMib(term.free_bytes)} free - ${formatMib(term.headroom_bytes)} headroom`;
    return [term.device, words, formatMib(term.usable_bytes)];
  });
  return terms.length === 1 ? rows : [...rows, ["together", "", formatMib(total_bytes)]];
}

function listAnswerRows(report: DetectReport): TableRow[] {
  const { available_context_tokens: tokens, budget, source } = report;
  const origin = budget === null
    ? `from ${source}`
    : `exactly ${budget.exact_context_tokens}, limited by ${budget.limited_by}`;
  const verdict = report.loop_mode_eligible
    ? `yes, the floor is ${FLOOR_TOKENS} tokens`
    : `no: ${report.reason}`;
  return [
    ["context", tokens === null ? "unknown" : `${tokens} tokens, ${origin}`],
    ["fit for loops", verdict],
  ];
}

/**
 * What would raise the answer, with the figure that each change would give.
 *
 * @param settings How it is run now.
 * @param budgetBytes What it may use.
 * @returns One line for each change that helps; one that says so when nothing can.
 */
export function listRaises(
  model: SizedModel,
  settings: CacheSettings,
  budgetBytes: number,
): string[] {
  const now = largestContext(model, settings, budgetBytes);
  if (now === model.shape.nativeTokens) {
    return [`nothing: ${now} tokens is the model's native context`];
  }
  const retype = (type: string) => ({ ...settings, kvTypeK: type, kvTypeV: type });
  const smaller = { ...model, weightsBytes: Math.max(0, model.weightsBytes - GIB) };
  const changes: [string, SizedModel, CacheSettings, number][] = [
    ["--kv-type q8_0", model, retype("q8_0"), budgetBytes],
    ["--kv-type q4_0", model, retype("q4_0"), budgetBytes],
    ["--slots 1", model, { ...settings, slots: 1 }, budgetBytes],
    ["a model file 1 GiB smaller", smaller, settings, budgetBytes],
    ["1 GiB more free memory", model, settings, budgetBytes + GIB],
  ];
  return changes.flatMap(([change, changed, changedSettings, budget]) => {
    if (findOddCacheType(changed.shape, changedSettings) !== null) return [];
    const tokens = largestContext(changed, changedSettings, budget);
    return tokens > now ? [`${change}: ${roundContext(tokens)} tokens`] : [];
  });
}

// --- Input and output ---

function describeError(error: unknown): string {
  if (error instanceof Deno.errors.NotFound) return "no such file";
  // Without the words that repeat the path.
  return (error instanceof Error ? error.message : `${error}`).replace(/ \(os error \d+\).*/s, "");
}

function isFilePath(path: string): boolean {
  try {
    return Deno.statSync(path).isFile;
  } catch {
    return false; // Missing or unreadable: whoever opens it says why.
  }
}

/** Opens a regular file for random access while `use` runs. */
function withByteSource<T>(path: string, use: (source: ByteSource) => T): T {
  let file: Deno.FsFile;
  let sizeBytes: number;
  try {
    // Looked at before it is opened: opening a named pipe would wait for a writer.
    const info = Deno.statSync(path);
    if (!info.isFile) throw new Error("not a regular file");
    sizeBytes = info.size;
    file = Deno.openSync(path);
  } catch (error) {
    throw refusal(`Cannot read model file "${path}": ${describeError(error)}`);
  }
  try {
    return use({ sizeBytes, readAt: (offset, into) => readFileAt(file, offset, into) });
  } finally {
    file.close();
  }
}

function readFileAt(file: Deno.FsFile, offset: number, into: Uint8Array): number {
  file.seekSync(offset, Deno.SeekMode.Start);
  let filled = 0;
  while (filled < into.length) {
    const count = file.readSync(into.subarray(filled));
    if (count === null) break;
    filled += count;
  }
  return filled;
}

function readObject(path: string): Record<string, unknown> {
  return parseObject(readModelText(path), path);
}

function readModelText(path: string): string {
  return withByteSource(path, (source) => {
    if (source.sizeBytes <= JSON_LIMIT_BYTES) return readTextAt(source, 0, source.sizeBytes);
    throw refusal(`Cannot read model file "${path}": ${source.sizeBytes} bytes are too many`);
  });
}

function readFileSize(path: string): number {
  return withByteSource(path, (source) => source.sizeBytes);
}

/** Loads a model file or folder by its path. */
function loadModelPath(path: string): LoadedModel {
  if (isDirectory(path)) return loadHfModel(path);
  return basename(path) === "config.json" ? loadHfModel(dirname(path)) : loadGgufModel(path);
}

function loadGgufModel(path: string): LoadedModel {
  const paths = listShards(path);
  const shards = paths.map((shard) => withByteSource(shard, (bytes) => readGguf(bytes, shard)));
  return { source: "gguf", path, projectorBytes: 0, ...joinShards(shards, paths) };
}

function loadHfModel(folder: string): LoadedModel {
  const configPath = join(folder, "config.json");
  const header = parseHfConfig(readModelText(configPath), configPath);
  const paths = listSafetensors(folder);
  return {
    source: "hf",
    path: folder,
    files: paths.length,
    header,
    weightsBytes: sumOf(
      paths,
      (path) => withByteSource(path, (source) => readSafetensorsBytes(source, path)),
    ),
    projectorBytes: 0,
    warnings: ["weights count as they are stored; a server that converts them needs other room"],
  };
}

/** The files of a model: those of the index, else the one with the usual name, else all. */
function listSafetensors(folder: string): string[] {
  const indexPath = join(folder, "model.safetensors.index.json");
  let names: string[];
  if (isFilePath(indexPath)) {
    const map = readObject(indexPath)["weight_map"];
    names = [...new Set(Object.values(isRecord(map) ? map : {}).map(String))];
    const odd = names.find((name) => basename(name) !== name);
    if (odd !== undefined) throw refusal(`Cannot read "${indexPath}": file "${odd}"`);
  } else if (isFilePath(join(folder, "model.safetensors"))) names = ["model.safetensors"];
  else {
    names = [...Deno.readDirSync(folder)].map((entry) => entry.name)
      .filter((name) => name.endsWith(".safetensors"));
  }
  if (names.length > 0) return names.sort().map((name) => join(folder, name));
  throw refusal(`Cannot read model folder "${folder}": it holds no safetensors files`);
}

function homeDir(): string | undefined {
  return readEnv("HOME") ?? readEnv("USERPROFILE");
}

/**
 * The manifest of a model that ollama knows by this name, and the models folder; null when it knows
 * none. OLLAMA_MODELS takes the place of the user's and the service's folder.
 */
function findOllamaManifest(name: string): { folder: string; path: string } | null {
  const manifest = parseOllamaName(name);
  if (manifest === null) return null;
  const [named, home] = [readEnv("OLLAMA_MODELS"), homeDir()];
  const usual = [
    ...home === undefined ? [] : [join(home, ".ollama", "models")],
    OLLAMA_SERVICE_MODELS,
  ];
  const folders = named === undefined ? usual : [named];
  const folder = folders.find((each) => isFilePath(join(each, manifest)));
  return folder === undefined ? null : { folder, path: join(folder, manifest) };
}

function loadOllamaModel(name: string): LoadedModel | null {
  const found = findOllamaManifest(name);
  if (found === null) return null;
  const { folder, path } = found;
  const { model, extras } = parseOllamaManifest(readModelText(path), path);
  return {
    ...loadGgufModel(join(folder, model)),
    source: "ollama",
    path,
    projectorBytes: sumOf(extras, (blob) => readFileSize(join(folder, blob))),
  };
}

/** Resolves a path of models.json or of the command line; `~` is the home folder. */
function resolveModelPath(path: string, baseDir: string): string {
  const home = homeDir();
  return home !== undefined && /^~(?=[/\\]|$)/.test(path)
    ? home + path.slice(1)
    : resolve(baseDir, path);
}

/**
 * The path that `--model` means, or null where it means a name: what looks like a path is one; what
 * might be either is a name where ollama knows it.
 */
function findNamedPath(text: string): string | null {
  const isPath = text.endsWith(".gguf") || /^(?:[.~]{0,2}[/\\]|[A-Za-z]:[/\\])/.test(text) ||
    ((isDirectory(text) || isFilePath(text)) && findOllamaManifest(text) === null);
  return isPath ? resolveModelPath(text, Deno.cwd()) : null;
}

/**
 * Runs a program that asks about memory: no input, no inherited library paths (those of a CUDA
 * toolkit hold stubs that break nvidia-smi), a deadline, and no more output kept than needed.
 */
async function runProbe(argv: readonly [string, ...string[]]): Promise<ProbeOutput> {
  const isWindows = Deno.build.os === "windows";
  const path = `${readEnv("PATH") ?? "/usr/bin:/bin"}:${PROBE_PATH}`;
  let child: Deno.ChildProcess;
  try {
    child = new Deno.Command(argv[0], {
      args: argv.slice(1),
      stdin: "null",
      stdout: "piped",
      stderr: "piped",
      // Windows programs need more of the environment than can be named here.
      ...isWindows ? {} : {
        clearEnv: true,
        env: { PATH: path, HOME: homeDir() ?? "/", LC_ALL: "C" },
        detached: true,
      },
    }).spawn();
  } catch (error) {
    const isMissing = error instanceof Deno.errors.NotFound;
    return { problem: isMissing ? NOT_INSTALLED : `could not be run: ${describeError(error)}` };
  }
  const streams = [child.stdout.getReader(), child.stderr.getReader()] as const;
  let timer: ReturnType<typeof setTimeout> | undefined;
  const deadline = new Promise<string>((expire) => {
    const words = `gave no answer within ${PROBE_DEADLINE_MS / 1000} s`;
    timer = setTimeout(() => expire(words), PROBE_DEADLINE_MS);
  });
  const [out, err] = streams;
  const ended = Promise.all([child.status, readProbeText(out), readProbeText(err)]);
  const outcome = await Promise.race([ended.catch(describeError), deadline]);
  clearTimeout(timer);
  if (typeof outcome !== "string") {
    return { code: outcome[0].code, stdout: outcome[1], stderr: outcome[2] };
  }
  try {
    // The probe's whole group; on Windows itself.
    Deno.kill(isWindows ? child.pid : -child.pid, "SIGKILL");
  } catch {
    // It ended in the same moment.
  }
  // A descendant may hold the pipes open: they are let go, not waited for.
  await Promise.all(streams.map((stream) => stream.cancel()));
  return { problem: outcome };
}

/** @throws {Error} When there is too much of it. */
async function readProbeText(stream: ReadableStreamDefaultReader<Uint8Array>): Promise<string> {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { value, done } = await stream.read();
    if (done) return text;
    text += decoder.decode(value, { stream: true });
    if (text.length > PROBE_OUTPUT_BYTES) {
      throw new Error(`printed more than ${PROBE_OUTPUT_BYTES} bytes: ${listLines(text)[0]}`);
    }
  }
}

/** The first of some variables that is set, be it to nothing. */
function readVisible(...variables: string[]): VisibleDevices {
  for (const variable of variables) {
    const list = Deno.env.get(variable);
    if (list !== undefined) return { variable, list };
  }
  return null;
}

/** Asks everything that this system may answer. */
async function probeDevices(): Promise<ProbeReport[]> {
  switch (Deno.build.os) {
    case "darwin":
      return [parseAppleSysctl(await runProbe(APPLE_SYSCTL))];
    case "windows":
      return await probeWindows();
    default:
      return await probeLinux();
  }
}

async function probeLinux(): Promise<ProbeReport[]> {
  const [facts, smi] = await Promise.all([
    runProbe(["sh", "-c", LINUX_FACTS_SCRIPT]),
    runProbe(NVIDIA_SMI),
  ]);
  const files = parseLinuxFacts("problem" in facts ? "" : facts.stdout);
  const host = parseHostMemory(files);
  const nvidia = parseNvidiaSmi(smi, readVisible("CUDA_VISIBLE_DEVICES"), host);
  if (files.size === 0) {
    const failure = describeFailure(facts) ?? "printed nothing";
    return [
      nvidia,
      newProbe("linux", "unknown", `/proc and /sys could not be read: sh ${failure}`),
    ];
  }
  const amd = await probeAmd(files, host);
  return [explainMissingSmi(nvidia, files), amd, parseIntelSysfs(files), reportHost(host)];
}

/** An NVIDIA driver is loaded or a card is there, but nvidia-smi is not: unknown, not absent. */
function explainMissingSmi(report: ProbeReport, files: ReadonlyMap<string, string>): ProbeReport {
  const isThere = files.has("/proc/driver/nvidia/version") ||
    listDrmCards(files, "0x10de", "NVIDIA").length > 0;
  return isThere && report.reason === `nvidia-smi ${NOT_INSTALLED}`
    ? newProbe("nvidia", "unknown", `there is an NVIDIA card, but nvidia-smi ${NOT_INSTALLED}`)
    : report;
}

/** Asks sysfs, and rocm-smi where that does not tell. */
async function probeAmd(
  files: ReadonlyMap<string, string>,
  host: MemoryReading,
): Promise<ProbeReport> {
  const visible = readVisible("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES");
  const sysfs = parseAmdSysfs(files, visible, host);
  if (sysfs.devices.some((device) => device.free_bytes !== null)) return sysfs;
  const rocm = parseRocmSmi(await runProbe(ROCM_SMI), visible);
  return rocm.state === "found" ? rocm : sysfs;
}

async function probeWindows(): Promise<ProbeReport[]> {
  const [smi, registry, memory] = await Promise.all([
    runProbe(NVIDIA_SMI),
    runProbe(WINDOWS_REGISTRY),
    runProbe(WINDOWS_MEMORY),
  ]);
  return parseWindows({ smi, registry, memory }, readVisible("CUDA_VISIBLE_DEVICES"));
}

// --- Commands ---

/** What is asked about: a model by name and path, what is declared of it, how it is run. */
interface ModelRequest {
  name: string | null;
  /** Null where only ollama may know the name. */
  path: string | null;
  mmprojPath: string | null;
  declared: { source: "env" | "models.json"; tokens: number } | null;
  settings: CacheSettings;
}

/** Answers one command line; what goes wrong becomes the report's reason. */
async function detectContext(options: DetectOptions): Promise<Detection> {
  const detection: Detection = { report: new DetectReport(), need: null, raises: [] };
  const { report } = detection;
  try {
    const request = selectModel(options);
    report.model = request.name === null ? null : { name: request.name };
    const { declared } = request;
    if (declared !== null) {
      report.source = declared.source;
      setFigure(report, declared.tokens, declared.tokens);
      if (options.freeMib !== null) {
        report.warnings.push(`--free-mib is not looked at: ${declared.source} declares the window`);
      }
    }
    if (declared === null || options.contextTokens !== null) {
      const model = describeRequested(request, report, options.contextTokens);
      if (declared === null) await measure(model, request.settings, { detection, options });
    }
  } catch (error) {
    report.reason = error instanceof Error ? error.message : `${error}`;
    report.hint = error instanceof RefusedError ? error.hint : DECLARE_HINT;
  }
  return detection;
}

/** Sets the answer to print; whether a loop may run is decided on the exact figure. */
function setFigure(report: DetectReport, exactTokens: number, usableTokens: number): void {
  report.available_context_tokens = usableTokens;
  report.available_context_kb = usableTokens;
  report.loop_mode_eligible = exactTokens >= FLOOR_TOKENS;
  if (report.loop_mode_eligible) return;
  report.reason = `a context window of ${exactTokens} tokens is below the floor of ` +
    `${FLOOR_TOKENS} tokens for loops`;
  report.hint = RAISE_HINT;
}

function selectModel(options: DetectOptions): ModelRequest {
  const envTokens = readEnvTokens();
  // A declared window needs no model.
  const models = envTokens !== null && options.contextTokens === null ? null : readModelsAnywhere();
  const name = options.model ?? models?.default ?? null;
  const isListed = models !== null && name !== null && Object.hasOwn(models.models, name);
  const entry = isListed ? models.models[name]! : {};
  const resolveListed = (path: string | undefined) =>
    path === undefined || models === null ? null : resolveModelPath(path, dirname(models.path));
  const { context_tokens: tokens, kv_type: kvType = "f16" } = entry;
  formatOf(kvType);
  return {
    name,
    path: isListed || name === null ? resolveListed(entry.gguf) : findNamedPath(name),
    mmprojPath: resolveListed(entry.mmproj),
    declared: envTokens !== null
      ? { source: "env", tokens: envTokens }
      : tokens === undefined
      ? null
      : { source: "models.json", tokens },
    settings: {
      kvTypeK: options.kvTypeK ?? kvType,
      kvTypeV: options.kvTypeV ?? kvType,
      slots: options.slots ?? entry.slots ?? 1,
      ubatchTokens: options.ubatchTokens,
    },
  };
}

/** AUTOMATON_CONTEXT_TOKENS; null where it is not set. */
function readEnvTokens(): number | null {
  const text = readEnv("AUTOMATON_CONTEXT_TOKENS");
  if (text === undefined) return null;
  const tokens = /^\s*\d+\s*$/.test(text) ? Number(text) : NaN;
  if (Number.isSafeInteger(tokens) && tokens > 0) return tokens;
  throw refusal(
    `Cannot use AUTOMATON_CONTEXT_TOKENS "${text}": not a whole number of tokens above 0`,
    "unset AUTOMATON_CONTEXT_TOKENS",
  );
}

/** models.json of the project, else of the framework; outside a project only the latter. */
function readModelsAnywhere(): ModelsFile | null {
  const framework = findFrameworkDir(import.meta.url);
  let project = framework;
  try {
    project = findProjectDir(undefined, false);
  } catch (error) {
    // A window can be asked for anywhere, but a project that is named must be there.
    if (readEnv("AUTOMATON_PROJECT") !== undefined) throw error;
  }
  return readModels(project, framework);
}

function loadModel({ name, path, mmprojPath }: ModelRequest): LoadedModel {
  if (name === null) {
    throw refusal(
      "no model is declared: --model is not given and models.json names no default",
      "vram-detect --model FILE.gguf, or set AUTOMATON_CONTEXT_TOKENS",
    );
  }
  const loaded = path === null ? loadOllamaModel(name) : loadModelPath(path);
  if (loaded === null) {
    throw refusal(
      `Cannot find model "${name}": models.json declares neither its context_tokens nor its ` +
        "gguf, and ollama has no model of this name",
      "vram-detect --model FILE.gguf",
    );
  }
  const mmprojBytes = mmprojPath === null ? 0 : readFileSize(mmprojPath);
  return { ...loaded, projectorBytes: loaded.projectorBytes + mmprojBytes };
}

/** Loads the model and puts into the report what does not depend on the devices. */
function describeRequested(
  request: ModelRequest,
  report: DetectReport,
  contextTokens: number | null,
): LoadedModel & SizedModel {
  const loaded = loadModel(request);
  const { settings } = request;
  const shape = describeModel(loaded.header);
  const odd = findOddCacheType(shape, settings);
  if (odd !== null) throw refusal(`Cannot use cache type ${odd}`, "vram-detect --kv-type f16");
  const model = { ...loaded, shape, weightsBytes: loaded.weightsBytes + loaded.projectorBytes };
  report.model = describeForReport(request.name, model);
  report.memory = describeMemory(model, settings);
  report.assumptions = {
    kv_type_k: settings.kvTypeK,
    kv_type_v: settings.kvTypeV,
    slots: settings.slots,
    slots_share_cells: true,
    ubatch_tokens: settings.ubatchTokens,
    flash_attention: true,
    all_layers_on_device: true,
    vocab_tokens: shape.vocabTokens,
  };
  report.warnings.push(
    ...loaded.warnings,
    ...shape.upperBounds.map((why) => `upper bound: ${why}`),
  );
  if (contextTokens !== null) {
    report.memory_at_context = memoryAtContext(model, settings, contextTokens);
  }
  return model;
}

function describeForReport(
  name: string | null,
  { path, files, shape }: LoadedModel & SizedModel,
): DetectReport["model"] {
  const count = (is: (layer: LayerShape) => boolean) => shape.layers.filter(is).length;
  return {
    name,
    path,
    files,
    architecture: shape.architecture,
    layers: shape.layers.length,
    full_context_layers: count((layer) => layer.keyElements > 0 && !layer.isSliding),
    sliding_layers: count((layer) => layer.keyElements > 0 && layer.isSliding),
    recurrent_layers: count((layer) => layer.stateBytes > 0),
    window_tokens: shape.windowTokens,
    native_context_tokens: shape.nativeTokens,
    is_upper_bound: shape.upperBounds.length > 0,
  };
}

/** The terms of the derivation: those that are fixed and those that grow with each token. */
function describeMemory(
  model: LoadedModel & SizedModel,
  settings: CacheSettings,
): Record<string, number> {
  const none = memoryAtContext(model, settings, 0);
  return {
    weights_bytes: model.weightsBytes - model.projectorBytes,
    projector_bytes: model.projectorBytes,
    kv_bytes_per_token: bytesPerCell(model.shape, settings, false),
    // Of windows that are full.
    kv_swa_bytes: memoryAtContext(model, settings, LARGEST_COUNT).kv_swa_bytes,
    recurrent_bytes: none.recurrent_bytes,
    compute_bytes: none.compute_bytes,
    compute_bytes_per_token: 4 * settings.ubatchTokens,
  };
}

/** Finds the answer for the memory that is free, and puts it into the report. */
async function measure(
  model: LoadedModel & SizedModel,
  settings: CacheSettings,
  { detection, options }: { detection: Detection; options: DetectOptions },
): Promise<void> {
  const { report } = detection;
  await addDevices(report, options.freeMib);
  const budget = computeBudget(report.devices);
  const exactTokens = largestContext(model, settings, budget.total_bytes);
  const { nativeTokens } = model.shape;
  report.source = model.source;
  report.budget = {
    ...budget,
    exact_context_tokens: exactTokens,
    native_context_tokens: nativeTokens,
    limited_by: exactTokens === nativeTokens ? "the native context" : "memory",
  };
  detection.raises.push(...listRaises(model, settings, budget.total_bytes));
  const usableTokens = roundContext(exactTokens);
  if (usableTokens > 0) {
    detection.need = memoryAtContext(model, settings, exactTokens);
    setFigure(report, exactTokens, usableTokens);
    return;
  }
  detection.need = memoryAtContext(model, settings, CONTEXT_STEP_TOKENS);
  report.hint = RAISE_HINT;
  report.reason = exactTokens === nativeTokens
    ? `the model was made for ${nativeTokens} tokens, fewer than ${CONTEXT_STEP_TOKENS}`
    : `the model does not fit: ${CONTEXT_STEP_TOKENS} tokens need ` +
      `${formatMib(detection.need.total_bytes)}, the budget is ${formatMib(budget.total_bytes)}`;
}

async function addDevices(report: DetectReport, freeMib: number | null): Promise<void> {
  if (freeMib !== null) {
    const reading = readingOf(freeMib * MIB, freeMib * MIB, "");
    report.devices.push({ id: "what-if", name: "--free-mib", kind: "what-if", ...reading });
    return;
  }
  for (const { devices, ...probe } of await probeDevices()) {
    report.probes.push(probe);
    report.devices.push(...devices);
    if (probe.state === "unknown" && devices.length === 0) {
      report.devices.push(newUnknownDevice(probe.probe, probe.reason ?? "no reason given"));
    }
  }
  for (const { name, free_bytes, unknown_reason } of report.devices) {
    if (free_bytes === null) {
      report.warnings.push(`${name}: free memory unknown: ${unknown_reason}`);
    }
  }
}

// --- Command table ---

/** All options, in the order of `--help`. */
// deno-fmt-ignore -- a table: one row a line.
export const DETECT_OPTIONS: readonly OptionSpec[] = [
  { name: "model", value: "NAME|FILE", help: "a model of models.json, a .gguf file, a folder with config.json, an ollama model (default: models.json's default)" },
  { name: "kv-type", value: "TYPE", help: `type of the KV cache: ${KV_TYPES.join(", ")} (default: models.json's kv_type, else f16)` },
  { name: "kv-type-k", value: "TYPE", help: "type of its K part alone" },
  { name: "kv-type-v", value: "TYPE", help: "type of its V part alone" },
  { name: "slots", value: "N", help: "sequences at the same time (default: models.json's slots, else 1)" },
  { name: "ubatch", value: "N", help: `tokens of a physical batch (default: ${DEFAULT_UBATCH_TOKENS})` },
  { name: "context", value: "N", help: "also answer what N tokens of context need" },
  { name: "free-mib", value: "N", help: "suppose N MiB free on one device instead of asking the machine" },
  { name: "loop-mode", help: `say whether a loop may run, that is, whether the window holds ${FLOOR_TOKENS} tokens` },
  { name: "explain", help: "the derivation as a table" },
  { name: "json", help: "one line of JSON, the last of stdout" },
  { name: "help", help: "this text" },
  { name: "version", help: "the framework's version" },
];

/** The text of `--help`, without a final newline. */
export function renderDetectHelp(): string {
  return `vram-detect: how many tokens of context a model can hold on this machine

Usage: vram-detect [OPTION ...]

The first that answers: AUTOMATON_CONTEXT_TOKENS; context_tokens in models.json; a model file
measured against the memory that is free. Exit code 0: a figure was found; 1: none could be.

Options:
${renderOptions(DETECT_OPTIONS)}`.trimEnd();
}

function readDetectOptions(given: ReadonlyMap<string, string | true>): DetectOptions {
  const readType = (name: string): string | null => {
    const type = given.get(name);
    if (type === undefined) return null;
    if (KV_TYPES.includes(`${type}`)) return `${type}`;
    const nearest = findNearest(`${type}`, KV_TYPES);
    const advice = nearest === null ? KV_TYPES.join(", ") : `did you mean ${nearest}?`;
    throw new UsageError(`Cannot read flag "--${name}": "${type}" is no cache type (${advice})`);
  };
  const readNumber = (name: string, max: number) => readWholeNumber(given, name, { min: 1, max });
  const model = given.get("model");
  return {
    model: model === undefined ? null : `${model}`,
    kvTypeK: readType("kv-type-k") ?? readType("kv-type"),
    kvTypeV: readType("kv-type-v") ?? readType("kv-type"),
    slots: readNumber("slots", 4096) ?? null,
    ubatchTokens: readNumber("ubatch", 65536) ?? DEFAULT_UBATCH_TOKENS,
    contextTokens: readNumber("context", LARGEST_COUNT) ?? null,
    freeMib: readNumber("free-mib", LARGEST_COUNT) ?? null,
  };
}

// --- Main ---

/** Prints the figure or the table on stdout, remarks on stderr; with JSON, stdout is for its line. */
function printReport(detection: Detection, given: ReadonlyMap<string, string | true>): void {
  const { report } = detection;
  const isJson = given.has("json");
  if (given.has("explain")) {
    const table = renderExplanation(detection, terminalColumns());
    if (isJson) console.error(table);
    else console.log(table);
  } else if (!isJson) {
    if (report.available_context_tokens !== null) console.log(`${report.available_context_tokens}`);
    for (const warning of report.warnings) console.error(`warning: ${printable(warning)}`);
    if (report.reason !== null) console.error(`vram-detect: ${printable(report.reason)}`);
    else if (given.has("loop-mode")) console.error("vram-detect: a loop may run");
  }
  if (isJson) console.log(JSON.stringify(report));
  else if (report.hint !== null) console.error(`hint: ${report.hint}`);
}

/** Columns of the terminal; where there is none, as many as a mail or a log shows. */
function terminalColumns(): number {
  try {
    return Deno.consoleSize().columns || 80;
  } catch {
    return 80; // No terminal.
  }
}

/** Runs one command line; returns the exit code. */
export async function runVramDetect(args: readonly string[]): Promise<number> {
  try {
    const given = parseCommandLine(args, DETECT_OPTIONS);
    if (given.has("help")) {
      console.log(renderDetectHelp());
      return 0;
    }
    if (given.has("version")) {
      console.log(`vram-detect ${readVersion(findFrameworkDir(import.meta.url))}`);
      return 0;
    }
    const detection = await detectContext(readDetectOptions(given));
    printReport(detection, given);
    const { available_context_tokens, memory_at_context } = detection.report;
    const answer = given.has("context") ? memory_at_context : available_context_tokens;
    return answer === null ? 1 : 0;
  } catch (error) {
    return reportFailure(error, "vram-detect", args);
  }
}

if (import.meta.main) Deno.exit(await runVramDetect(Deno.args));
