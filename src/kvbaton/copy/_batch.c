/* The rows of one tensor lie near each other, and those of another one far away. All rows of a box are copied before
 * those of the next one: who copies the boxes of a row in turn jumps from tensor to tensor with each piece.
 */
#include "_batch.h"

#include <stdlib.h>

int batch_open(Batch *batch, ptrdiff_t count)
{
    *batch = (Batch){0};
    batch->tables = calloc(count ? (size_t)count : 1, sizeof(Table));
    if (!batch->tables)
        return 0;
    batch->table_count = count;
    return 1;
}

/* Equal steps of at most `chunk` bytes; of whole units where there are many in one, so that no piece is cut and no two
 * threads write into one cache line. */
static int64_t step_of(int64_t nbytes, int64_t unit_bytes, int64_t chunk)
{
    int64_t steps = nbytes / chunk + (nbytes % chunk != 0);
    int64_t step = nbytes / steps + (nbytes % steps != 0);
    if (step < 4 * unit_bytes)
        return step;
    int64_t whole = (step + unit_bytes - 1) / unit_bytes * unit_bytes;
    return whole <= chunk ? whole : step / unit_bytes * unit_bytes;
}

static void add_part(Batch *batch, const Table *table, ptrdiff_t first, ptrdiff_t last, int64_t unit_bytes,
                     int64_t chunk)
{
    int64_t nbytes = unit_bytes * table->unit_count, start = 0;
    for (ptrdiff_t index = first; index < last; index++) {
        table->boxes[index].start = start;
        start += table->boxes[index].bytes;
    }
    batch->parts[batch->part_count++] = (Part){
        {.boxes = table->boxes + first,
         .count = last - first,
         .unit_bytes = unit_bytes,
         .source_units = table->units,
         .destination_units = table->units + table->unit_count},
        nbytes, step_of(nbytes, unit_bytes, chunk)};
}

/* As many boxes together as stay within a chunk; a box that is longer stands alone. */
static void cut_table(Batch *batch, const Table *table, int64_t chunk)
{
    ptrdiff_t first = 0;
    int64_t unit_bytes = 0;
    for (ptrdiff_t index = 0; index < table->count; index++) {
        int64_t bytes = table->boxes[index].bytes;
        if (index > first && (unit_bytes + bytes) * table->unit_count > chunk) {
            add_part(batch, table, first, index, unit_bytes, chunk);
            first = index, unit_bytes = 0;
        }
        unit_bytes += bytes;
    }
    add_part(batch, table, first, table->count, unit_bytes, chunk);
}

static int64_t bytes_of(const Table *table)
{
    int64_t unit_bytes = 0;
    for (ptrdiff_t index = 0; index < table->count; index++)
        unit_bytes += table->boxes[index].bytes;
    return unit_bytes * table->unit_count;
}

int batch_cut(Batch *batch, int64_t chunk)
{
    ptrdiff_t most = 0;
    for (ptrdiff_t index = 0; index < batch->table_count; index++) {
        /* Two parts that follow each other hold more than a chunk. */
        int64_t parts = 2 * (bytes_of(&batch->tables[index]) / chunk) + 1;
        most += parts < batch->tables[index].count ? (ptrdiff_t)parts : batch->tables[index].count;
    }
    batch->parts = malloc((most ? (size_t)most : 1) * sizeof(Part));
    if (!batch->parts)
        return 0;
    for (ptrdiff_t index = 0; index < batch->table_count; index++)
        if (bytes_of(&batch->tables[index]))
            cut_table(batch, &batch->tables[index], chunk);
    return 1;
}

ptrdiff_t batch_left(const Batch *batch)
{
    if (batch->part == batch->part_count)
        return 0;
    const Part *part = &batch->parts[batch->part];
    return (ptrdiff_t)((part->nbytes - batch->at + part->step - 1) / part->step) + batch->part_count - batch->part - 1;
}

const Part *batch_take(Batch *batch, int64_t *begin, int64_t *end)
{
    const Part *part = &batch->parts[batch->part];
    *begin = batch->at;
    *end = part->nbytes - batch->at > part->step ? batch->at + part->step : part->nbytes;
    batch->at = *end;
    if (*end == part->nbytes)
        batch->part++, batch->at = 0;
    return part;
}

void batch_free(Batch *batch)
{
    for (ptrdiff_t index = 0; index < batch->table_count; index++) {
        free(batch->tables[index].boxes);
        free(batch->tables[index].units);
    }
    free(batch->tables);
    free(batch->parts);
    *batch = (Batch){0};
}
