-- include revision
-- args: lora, owner, fields
-- update_lora: change fields of a LoRA that no index holds, such as its name; `fields` is JSON. Returns 1, or 0 when
-- the owner has no such LoRA.
local held = redis.call('HMGET', K('lora:' .. lora), 'source', 'owner')
if held[1] ~= 'registered' or held[2] ~= owner then return 0 end
log_change(lora)
for name, value in pairs(cjson.decode(fields)) do redis.call('HSET', K('lora:' .. lora), name, value) end
return 1
