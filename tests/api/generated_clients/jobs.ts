// The jobs document's whole round trip, typed by it alone: an upload, a job that begins from it, an upscale.
import createClient from "openapi-fetch";
import type { components, paths } from "./generated/jobs.js";

type Schemas = components["schemas"];

const [baseUrl, key, ...loras] = process.argv.slice(2) as [string, string, ...string[]];
const client = createClient<paths>({ baseUrl, headers: { "X-API-Key": key } });

let ended = "";

/** Follow a job by its events, and return the status that the last one shows. */
async function followed(job_id: string): Promise<string> {
  const path = { path: { job_id } };
  const { data } = await client.GET("/v1/jobs/{job_id}/events", { params: path, parseAs: "text" });
  const [name, , text] = (data ?? "").trim().split("\n\n").at(-1)?.split("\n") ?? [];
  const last = { event: name?.slice(7), data: JSON.parse(text?.slice(6) ?? "") } as Schemas["JobEvent"];
  return last.event === "end" ? last.data.status : "";
}

async function completed(job: Schemas["Job"]): Promise<Schemas["CompletedJob"]> {
  if (job.status === "completed") return job;
  if (job.status !== "queued" && job.status !== "running") throw new Error(job.error.code);
  // @ts-expect-error a job that has not ended has no images
  job.images;
  if (ended === "") ended = await followed(job.id);
  await new Promise((resolve) => setTimeout(resolve, 100));
  const { data, error } = await client.GET("/v1/jobs/{job_id}", { params: { path: { job_id: job.id } } });
  if (error) throw new Error(error.error.code);
  return completed(data);
}

async function create(body: Schemas["GenerationWish"] | Schemas["UpscaleWish"], Prefer = "wait=0") {
  const { data, error } = await client.POST("/v1/jobs", { params: { header: { Prefer } }, body });
  if (error) throw new Error(error.error.message);
  return completed(data);
}

function same(found: unknown, expected: unknown): void {
  if (JSON.stringify(found) !== JSON.stringify(expected)) throw new Error(`${JSON.stringify(found)}`);
}

const offered = await client.GET("/v1/base-models");
const model = offered.data?.base_models[0];
if (model === undefined) throw new Error("no base model");
const webhook = await client.POST("/v1/webhooks", { body: { url: "https://1.1.1.1/told" } });
if (webhook.error) throw new Error(webhook.error.error.message);
same(webhook.data.secret.slice(0, 6), "whsec_");

const drawn = await create({
  prompt: "purple mountains",
  base_model: model.id,
  loras: loras.map((id) => ({ id, weight: 0.5 })),
  sampler: "dpm++2m-karras",
  steps: 7,
  width: 320,
  num_images: 2,
  seed: 7,
  output_format: "webp",
  priority: "low",
  start_within: 60,
  metadata: { order: "4711" },
});
const asked = drawn.request;
if (asked === undefined || !("prompt" in asked)) throw new Error("no generation");
same([asked.loras.map((lora) => lora.id), asked.sampler, asked.steps, asked.seeds], [loras, "dpm++2m-karras", 7, ["7", "8"]]);
same([asked.metadata["order"], asked.output_format, asked.priority, asked.start_within], ["4711", "webp", "low", 60]);
same(ended, "completed");
const [first, second] = drawn.images;
if (first === undefined || second === undefined) throw new Error("no images");

const form = new FormData();
form.append("file", await (await fetch(first.url)).blob(), "mountains.webp");
const added = await client.POST("/v1/images", { body: { file: "" }, bodySerializer: () => form });
if (added.error) throw new Error(added.error.error.message);
const begun = await create({ prompt: "blue mountains", image_id: added.data.id, strength: 0.5 }, "wait=20");
same(begun.request && "prompt" in begun.request && begun.request.image_id, added.data.id);
const larger = await create({ kind: "upscale", image_id: added.data.id, scale_factor: 2 });
same(larger.request && "scale_factor" in larger.request && larger.request.scale_factor, 2);

// @ts-expect-error without its kind it would be a generation, which needs a prompt
const refused = await client.POST("/v1/jobs", { body: { image_id: added.data.id } });
const code: Schemas["Error"]["code"] | undefined = refused.error?.error.code;
console.log(JSON.stringify([larger.images[0]?.width, code, (await fetch(second.url)).headers.get("content-type")]));
