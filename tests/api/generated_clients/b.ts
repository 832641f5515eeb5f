// Interface B's whole round trip, typed by the document alone: list models, accept, poll, download.
import createClient from "openapi-fetch";
import type { components, paths } from "./generated/b.js";

type CompletedRun = components["schemas"]["CompletedRun"];

const [baseUrl, key] = process.argv.slice(2) as [string, string];
const client = createClient<paths>({ baseUrl, headers: { "X-API-Key": key } });

async function completed(run_id: string): Promise<CompletedRun> {
  for (;;) {
    const { data, error } = await client.GET("/v1/generations/{run_id}", { params: { path: { run_id } } });
    if (error) throw new Error(error.error.code);
    if (data.status === "failed") throw new Error(data.error.message);
    if (data.status === "completed") return data;
    // @ts-expect-error a run that has not ended has no image
    data.image_url;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

const models = await client.GET("/v1/models");
const model = models.data?.models[0];
if (model === undefined) throw new Error("no model");

// The document names defaults, and with its own switches openapi-typescript then wants every such field.
const usual = { lora_weight: 0.75, width: 512, height: 512 };
const accepted = await client.POST("/v1/generate", {
  body: { ...usual, positive_prompt: "purple mountains", negative_prompt: "green", model_id: model.id, guidance: 6.5 },
});
if (accepted.error) throw new Error(accepted.error.error.message);
const run = await completed(accepted.data.run_id);

// @ts-expect-error `prompt` is a field of interface A
const refused = await client.POST("/v1/generate", { body: { prompt: "x", model_id: model.id } });
const png = await fetch(run.image_url);
console.log(JSON.stringify([run.progress, refused.error?.error.code, png.headers.get("content-type")]));
