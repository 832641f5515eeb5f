-- A pool is the jobs that the same workers take: upscales, or generations with the base models of one group. Its
-- name is `upscale`, `generation` for the group `default`, and `generation.<group>` for any other; the set `pools` holds
-- names of the last form. In a job's record the field is called `kind`.

local function pools()
  local found = redis.call('SMEMBERS', K('pools'))
  found[#found + 1] = 'generation'
  found[#found + 1] = 'upscale'
  return found
end

-- Remember a pool until the reaper finds that nothing is left of it.
local function know_pool(pool)
  if pool ~= 'generation' and pool ~= 'upscale' then redis.call('SADD', K('pools'), pool) end
end

local function base_models() return cjson.decode(redis.call('HGET', K('catalog'), 'base_models') or '[]') end

-- Return what the catalog says of the base model of a job: `base`, or that of its first LoRA where it names none, as jobs
-- of interfaces A and B. nil where it is gone.
local function base_model_of(job)
  local name = job.base or job.adapters[1] and redis.call('HGET', K('lora:' .. job.adapters[1]), 'base_model')
  for _, model in ipairs(base_models()) do
    if model.id == name then return model end
  end
end

local function pool_of(model)
  if not model.group or model.group == 'default' then return 'generation' end
  return 'generation.' .. model.group
end

-- Return the pool that the catalog wants a job in: its own where the catalog has no word on it.
local function wanted_pool(job)
  local model = base_model_of(job)
  return model and pool_of(model) or job.pool
end
