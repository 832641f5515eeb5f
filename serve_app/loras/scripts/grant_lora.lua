-- include permission
-- include revision
-- args: lora, account, decision
-- grant_lora: allow or deny an account a LoRA, over what its record says. Returns 1, or 0 when there is no such LoRA.
if redis.call('EXISTS', K('lora:' .. lora)) == 0 then return 0 end
next_revision()
redis.call('HSET', K('grants:' .. account), lora, decision)
redis.call('SADD', K('granted:' .. lora), account)
if decision == 'deny' then withdraw(lora) end
return 1
