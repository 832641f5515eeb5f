-- include permission
-- args: lora, account
-- read_lora: read a LoRA that the account owns or may use. Returns {record, {account id, name} of each with whom its
-- owner shares it, for the owner alone}, or {} when there is no such LoRA.
local is_owner = redis.call('HGET', K('lora:' .. lora), 'owner') == account
if not is_owner and not may_use_adapter(account, lora) then return {} end
local shared = {}
if is_owner then
  for _, id in ipairs(redis.call('SMEMBERS', K('granted:' .. lora))) do
    if redis.call('HGET', K('grants:' .. id), lora) == 'allow' then
      shared[#shared + 1] = {id, redis.call('HGET', K('account:' .. id), 'name') or ''}
    end
  end
end
return {redis.call('HGETALL', K('lora:' .. lora)), shared}
