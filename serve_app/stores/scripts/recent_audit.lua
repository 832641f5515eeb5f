-- args: log, action, before, limit:number, most:number, max_logs:number
-- recent_audit: rows of the audit log, newest first: of one log (a pseudonym) or, with '', of those written last; of one action, or any.
-- The list begins before a row's id, finds about `limit` and looks at `most`: rows of one id in several logs stay together.
-- Returns {{log, id, fields} of each, the id of the last row looked at, or '' when there are no more}.
local names = {log, log .. ':refused'}
if log == '' then names = redis.call('ZREVRANGE', K('audit_logs'), 0, max_logs - 1) end

local function parse(id)
  local ms, number = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(number)
end

local function newest(name, id)
  return redis.call('XREVRANGE', K('audit:' .. name), id == '' and '+' or '(' .. id, '-', 'COUNT', 1)[1]
end

local heads = {}
for _, name in ipairs(names) do
  local row = newest(name, before)
  if row then
    local ms, number = parse(row[1])
    heads[#heads + 1] = {name = name, row = row, ms = ms, number = number}
  end
end

local found, looked_at, last = {}, 0, ''
while #heads > 0 do
  local first = 1
  for i = 2, #heads do
    local a, b = heads[i], heads[first]
    if a.ms > b.ms or (a.ms == b.ms and a.number > b.number) then first = i end
  end
  local head = heads[first]
  if (#found >= limit or looked_at >= most) and head.row[1] ~= last then return {found, last} end
  looked_at, last = looked_at + 1, head.row[1]
  local fields = {}
  for i = 1, #head.row[2], 2 do fields[head.row[2][i]] = head.row[2][i + 1] end
  if action == '' or fields.action == action then found[#found + 1] = {head.name, head.row[1], head.row[2]} end
  head.row = newest(head.name, head.row[1])
  if head.row then
    head.ms, head.number = parse(head.row[1])
  else
    table.remove(heads, first)
  end
end
return {found, ''}
