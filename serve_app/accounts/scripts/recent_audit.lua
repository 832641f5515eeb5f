-- args: action, before, limit:number, most:number, logs:list
-- recent_audit: reads rows of these logs (pseudonyms), newest first; of one action, or of any. The list begins
-- before a row's id, finds about `limit` rows and looks at about
-- `most`: rows of one id in several logs stay together. Returns {{log, id, fields} of each, the id of the last row
-- looked at, or '' when there are no more}.
local function parse(id)
  local ms, number = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(number)
end

local function newest(name, id)
  return redis.call('XREVRANGE', K('audit:' .. name), id == '' and '+' or '(' .. id, '-', 'COUNT', 1)[1]
end

-- A binary heap of each log's next row, the newest at 1.
local heads = {}

local function is_newer(a, b) return a.ms > b.ms or (a.ms == b.ms and a.number > b.number) end

local function sink(i)
  while true do
    local top, left = i, 2 * i
    if heads[left] and is_newer(heads[left], heads[top]) then top = left end
    if heads[left + 1] and is_newer(heads[left + 1], heads[top]) then top = left + 1 end
    if top == i then return end
    heads[i], heads[top] = heads[top], heads[i]
    i = top
  end
end

for _, name in ipairs(logs) do
  local row = newest(name, before)
  if row then
    local ms, number = parse(row[1])
    heads[#heads + 1] = {name = name, row = row, ms = ms, number = number}
  end
end
for i = math.floor(#heads / 2), 1, -1 do sink(i) end

local found, looked_at, last = {}, 0, ''
while heads[1] do
  local head = heads[1]
  if (#found >= limit or looked_at >= most) and head.row[1] ~= last then return {found, last} end
  looked_at, last = looked_at + 1, head.row[1]
  local fields = {}
  for i = 1, #head.row[2], 2 do fields[head.row[2][i]] = head.row[2][i + 1] end
  if action == '' or fields.action == action then found[#found + 1] = {head.name, head.row[1], head.row[2]} end
  head.row = newest(head.name, head.row[1])
  if head.row then
    head.ms, head.number = parse(head.row[1])
  else
    heads[1] = heads[#heads]
    heads[#heads] = nil
  end
  if heads[1] then sink(1) end
end
return {found, ''}
