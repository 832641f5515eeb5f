-- Every script begins with this. KEYS[1] is the prefix with the hash tag; every key is built from it. The loader then
-- makes a local of each argument that the `-- args:` lines name: text as it is, `:number`, `:flag` (a boolean), `:list`
-- (all that follow). Scripts run on Redis 6.2: no shebang, no Functions. The clock is the server's, so a caller's
-- cannot matter.
local P = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function K(name) return P .. name end
-- Lets a script go on at the server's `maxmemory`, which refuses its first write if that may need memory: this one
-- frees some.
local function write_also_when_full() redis.call('DEL', K('nothing')) end
-- Runs a command that such a server refuses only where it does: else nothing has to be freed.
local function call_also_when_full(...)
  local answer = redis.pcall(...)
  if type(answer) ~= 'table' or not answer.err then return answer end
  write_also_when_full()
  return redis.call(...)
end
local function num(text, default) return tonumber(text) or default end
