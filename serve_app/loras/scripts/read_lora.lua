-- include permission
-- args: lora, account
-- read_lora: read a LoRA that the account owns or may use. Returns {record, ids of accounts with a grant or denial, for
-- the owner alone}, or {} when there is no such LoRA.
local is_owner = redis.call('HGET', K('lora:' .. lora), 'owner') == account
if not is_owner and not may_use_adapter(account, lora) then return {} end
return {redis.call('HGETALL', K('lora:' .. lora)), is_owner and redis.call('SMEMBERS', K('granted:' .. lora)) or {}}
