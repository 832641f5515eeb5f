-- include lora
-- args: lora
-- remove_lora: remove a registered LoRA with its grants: its queued jobs end, and its id is not given again. Returns removed, unknown,
-- or file for a row of the catalog file, which comes back from there.
local source = redis.call('HGET', K('lora:' .. lora), 'source')
if not source then return 'unknown' end
if source == 'file' then return 'file' end
for _, account in ipairs(redis.call('SMEMBERS', K('granted:' .. lora))) do redis.call('HDEL', K('grants:' .. account), lora) end
redis.call('DEL', K('granted:' .. lora))
remove_lora(lora)
return 'removed'
