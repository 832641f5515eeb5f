-- args: account, followed:number, own_known:number
-- list_loras: what has changed of LoRAs after revision `followed`, and those that the account alone may use, unless
-- they are those of revision `own_known`. Of what everyone may use it reads the changed records alone.
-- Returns {revision, {{id, its revision, record or {}} of each changed one, in order}, ids of LoRAs that the account
-- owns, those offered to its id, those offered to its name, its grants and denials, which override these}; without the
-- last four where they are known. Of at most `AT_ONCE` changed ones, after which a call goes on. Where the log does not
-- have `followed`, as after a failover, the revision alone.
local AT_ONCE = 200
local revision = num(redis.call('GET', K('loras_revision')), 0)
local log = redis.call('HMGET', K('loras_log'), 'last', 'from')
local is_logged = num(log[1], 0) == revision and num(log[2], 0) <= (followed or -1) and followed <= revision
if followed ~= revision and not is_logged then return {revision} end

local changed = {}
local rows = followed == revision and {}
  or redis.call('ZRANGEBYSCORE', K('loras_changed'), '(' .. followed, '+inf', 'WITHSCORES', 'LIMIT', 0, AT_ONCE)
for i = 1, #rows, 2 do
  changed[#changed + 1] = {rows[i], tonumber(rows[i + 1]), redis.call('HGETALL', K('lora:' .. rows[i]))}
end
if own_known == revision then return {revision, changed} end

local function ids_of(index) return redis.call('ZRANGE', K(index), 0, -1) end
local name = redis.call('HGET', K('account:' .. account), 'name')
return {revision, changed, ids_of('loras_owned:' .. account), ids_of('loras_offered:' .. account),
  name and ids_of('loras_offered:' .. name) or {}, redis.call('HGETALL', K('grants:' .. account))}
