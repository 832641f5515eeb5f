-- Who may use a LoRA, and what follows when somebody no longer may.

-- Returns whether the account may use the LoRA now: the operator's last grant or denial holds; without one, its owner
-- may, and those to whom it is offered. Nobody may use one that is gone. `record`: its owner and `open`, if known.
local function may_use_adapter(account, id, record)
  record = record or redis.call('HMGET', K('lora:' .. id), 'owner', 'open')
  if not record[1] then return false end
  local grant = redis.call('HGET', K('grants:' .. account), id)
  if grant then return grant == 'allow' end
  if record[2] == '1' or record[1] == account then return true end
  if redis.call('ZSCORE', K('loras_offered:' .. account), id) then return true end
  local name = redis.call('HGET', K('account:' .. account), 'name')
  return (name and redis.call('ZSCORE', K('loras_offered:' .. name), id)) and true or false
end

-- Somebody may no longer use the LoRA, or its jobs are to wait elsewhere: the reaper looks at all that wait. `index` is
-- the LoRA's id, `base:` and a base model's for jobs without one, or `granted:` and the id of a LoRA that is gone.
local function withdraw(index) redis.call('ZADD', K('loras_withdrawn'), 0, index) end

-- Forget at most `most` grants of a LoRA that is gone; return how many.
local function forget_grants(lora, most)
  local accounts = redis.call('SPOP', K('granted:' .. lora), most)
  for _, account in ipairs(accounts) do redis.call('HDEL', K('grants:' .. account), lora) end
  return #accounts
end
