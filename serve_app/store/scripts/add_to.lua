-- Add to numbers of a hash, however many, in two calls; `amounts` has each one's field before what is added.
local function add_to(name, amounts)
  local fields = {}
  for i = 1, #amounts, 2 do fields[#fields + 1] = amounts[i] end
  for i, number in ipairs(redis.call('HMGET', name, unpack(fields))) do
    amounts[2 * i] = string.format('%.17g', num(number, 0) + amounts[2 * i])
  end
  redis.call('HSET', name, unpack(amounts))
end
