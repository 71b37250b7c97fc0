#include "_bounds.h"

#include "_boxes.h"

/* More than any region has, and far from where sums overflow. */
#define LIMIT ((int64_t)1 << 59)

/* *sum += left * right, all zero or positive; 0 where that is not below LIMIT. */
static int add_product(int64_t *sum, int64_t left, int64_t right)
{
    int64_t product;
    return !__builtin_mul_overflow(left, right, &product) && product < LIMIT
           && !__builtin_add_overflow(*sum, product, sum) && *sum < LIMIT;
}

static int is_sound(const int64_t *shape, const int64_t *side, ptrdiff_t regions)
{
    return shape[COUNT0] >= 1 && shape[COUNT1] >= 1 && shape[RUN] >= 1 && side[REGION] >= 0 && side[REGION] < regions
           && side[OFFSET] >= 0 && side[ROW_STRIDE] >= 0 && side[UNITS_PER_ROW] >= 1 && side[UNIT_STRIDE] >= 0
           && side[STRIDE0] >= 0 && side[STRIDE1] >= 0;
}

/* Where the furthest unit up to `unit` begins: the last one, or the last part of the row before. */
static int furthest_unit(const int64_t *side, int64_t unit, int64_t *begin)
{
    int64_t row = unit / side[UNITS_PER_ROW], part = unit % side[UNITS_PER_ROW], last = 0, before = 0;
    if (!add_product(&last, row, side[ROW_STRIDE]) || !add_product(&last, part, side[UNIT_STRIDE]))
        return 0;
    if (row > 0
        && (!add_product(&before, row - 1, side[ROW_STRIDE])
            || !add_product(&before, side[UNITS_PER_ROW] - 1, side[UNIT_STRIDE])))
        return 0;
    *begin = last > before ? last : before;
    return 1;
}

void find_extent(const int64_t *numbers, ptrdiff_t count, int64_t *lowest, int64_t *highest)
{
    int64_t low = numbers[0], high = numbers[0];
    for (ptrdiff_t index = 1; index < count; index++) {
        low = numbers[index] < low ? numbers[index] : low;
        high = numbers[index] > high ? numbers[index] : high;
    }
    *lowest = low;
    *highest = high;
}

int64_t bytes_inside(const int64_t *shape, const int64_t *table, ptrdiff_t count, const int64_t *units,
                     ptrdiff_t unit_count, const int64_t *region_bytes, ptrdiff_t regions)
{
    int64_t lowest, highest, total = 0, all = 0;
    if (count == 0 || unit_count == 0)
        return -1;
    find_extent(units, unit_count, &lowest, &highest);
    if (lowest < 0)
        return -1;
    for (ptrdiff_t index = 0; index < count; index++, shape += SHAPE_COLUMNS, table += SIDE_COLUMNS) {
        int64_t end, runs = 0;
        if (!is_sound(shape, table, regions) || !furthest_unit(table, highest, &end)
            || !add_product(&end, shape[COUNT0] - 1, table[STRIDE0])
            || !add_product(&end, shape[COUNT1] - 1, table[STRIDE1]) || !add_product(&end, table[OFFSET], 1)
            || !add_product(&end, shape[RUN], 1) || end > region_bytes[table[REGION]])
            return -1;
        if (!add_product(&runs, shape[COUNT0], shape[COUNT1]) || !add_product(&total, runs, shape[RUN]))
            return -1;
    }
    return add_product(&all, total, (int64_t)unit_count) ? all : -1;
}
