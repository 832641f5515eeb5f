-- include permission
-- include lora
-- include pools
-- args: lora
-- remove_lora: remove a registered LoRA with its grants: the reaper ends its waiting jobs, and its id is not given
-- again. Its weights are due to be removed. Returns {removed, its stored weights, or '' if another LoRA has the same},
-- {unknown}, or {file} for a row of the catalog file.
local source = redis.call('HGET', K('lora:' .. lora), 'source')
if not source then return {'unknown', ''} end
if source == 'file' then return {'file', ''} end
local weights = redis.call('HMGET', K('lora:' .. lora), 'sha256', 'file')
for _, account in ipairs(redis.call('SMEMBERS', K('granted:' .. lora))) do
  redis.call('HDEL', K('grants:' .. account), lora)
end
redis.call('DEL', K('granted:' .. lora))
for _, pool in ipairs(pools()) do
  redis.call('LREM', K('recent_adapters:' .. pool), 0, lora)
  for _, model in ipairs(base_models()) do
    redis.call('LREM', K('recent_adapters:' .. pool), 0, lora .. ' ' .. model.id)
  end
end
remove_lora(lora)
if redis.call('EXISTS', K('loras_stored:' .. weights[1])) == 1 then return {'removed', ''} end
redis.call('ZADD', K('loras_unused'), now, weights[2])
return {'removed', weights[2]}
