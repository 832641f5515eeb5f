-- args: source, sequence:number, life_ms:number, amounts:list
-- add_measures: add what a process has measured, a name and an amount by turns, to the numbers of all. A call that is
-- repeated has the same sequence, and adds nothing. Two calls do for all of them.
local last, names = K('measured:' .. source), {}
if num(redis.call('GET', last), 0) >= sequence then return end
redis.call('SET', last, sequence, 'PX', life_ms)
for i = 1, #amounts, 2 do names[#names + 1] = amounts[i] end
for i, sum in ipairs(redis.call('HMGET', K('measures'), unpack(names))) do
  amounts[2 * i] = string.format('%.17g', num(sum, 0) + amounts[2 * i])
end
redis.call('HSET', K('measures'), unpack(amounts))
