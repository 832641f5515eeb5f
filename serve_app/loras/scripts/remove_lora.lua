-- include permission
-- include lora
-- args: lora
-- remove_lora: remove a registered LoRA with its grants, the first of many here and the others by the reaper, which
-- also ends its waiting jobs. Its id is not given again, its weights are due to be removed. Returns {removed, stored
-- weights, or '' if another LoRA has the same}, {unknown}, or {file} for a row of the catalog file.
local AT_ONCE = 100
local source = redis.call('HGET', K('lora:' .. lora), 'source')
if not source then return {'unknown', ''} end
if source == 'file' then return {'file', ''} end
local weights = redis.call('HMGET', K('lora:' .. lora), 'sha256', 'file')
remove_lora(lora)
if forget_grants(lora, AT_ONCE) == AT_ONCE then withdraw('granted:' .. lora) end
if redis.call('EXISTS', K('loras_stored:' .. weights[1])) == 1 then return {'removed', ''} end
redis.call('ZADD', K('loras_unused'), now, weights[2])
return {'removed', weights[2]}
